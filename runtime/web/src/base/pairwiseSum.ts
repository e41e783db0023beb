/** Sums in the order of numpy, so that means and sums of probabilities have the last bit that they have in Python. */

const BLOCK = 128;

/**
 * Return the sum of the values begin … end - 1 as `np.add.reduce` adds them: eight sums side by side in blocks of at most
 * 128 values, and the sums of blocks in pairs. https://github.com/numpy/numpy, loops_utils.h.src, pairwise_sum
 */
export function pairwiseSum(values: ArrayLike<number>, begin = 0, end = values.length): number {
  const count = end - begin;
  if (count < 8) {
    let sum = 0;
    for (let i = begin; i < end; i++) sum += values[i];
    return sum;
  }
  if (count <= BLOCK) {
    let [a, b, c, d, e, f, g, h] = [0, 0, 0, 0, 0, 0, 0, 0];
    let i = begin;
    for (; i + 8 <= end; i += 8) {
      a += values[i];
      b += values[i + 1];
      c += values[i + 2];
      d += values[i + 3];
      e += values[i + 4];
      f += values[i + 5];
      g += values[i + 6];
      h += values[i + 7];
    }
    let sum = a + b + (c + d) + (e + f + (g + h));
    for (; i < end; i++) sum += values[i];
    return sum;
  }
  const half = Math.floor(count / 2);
  const middle = begin + half - (half % 8);
  return pairwiseSum(values, begin, middle) + pairwiseSum(values, middle, end);
}
