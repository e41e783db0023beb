/**
 * Images of 8 bits a channel, resized with the numbers of Pillow.
 *
 * A pixel is the weighted mean of the pixels under a filter, along rows and along columns, each rounded to 8 bits. Weights
 * are whole multiples of 2 ** -22. https://github.com/python-pillow/Pillow, src/libImaging/Resample.c
 *
 * The order is that of Pillow 13: rows first, unless the height shrinks by more than twice as many pixels as the width.
 * Earlier versions always took rows first, which changes pixels by 1, and by more next to sharp edges.
 */

/** An image: channels next to each other, pixel by pixel and row by row. */
export interface Raster {
  readonly data: Uint8Array;
  readonly width: number;
  readonly height: number;
  readonly channels: number;
}

export const FILTERS = ["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] as const;
export type Filter = (typeof FILTERS)[number];

const PRECISION_BITS = 22;
const CUBIC = -0.5; // the parameter of the bicubic filter
const [HAMMING_MEAN, HAMMING_AMPLITUDE] = [Math.fround(0.54), Math.fround(0.46)]; // float32 in Pillow

/** Filter → half of its width, and its weight at a distance. */
const KERNELS: Record<Exclude<Filter, "nearest">, readonly [support: number, weight: (x: number) => number]> = {
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, hamming],
  bicubic: [2, bicubic],
  lanczos: [3, (x) => (-3 <= x && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

/** Return an image of another size. Cost: linear in the pixels of both, times the width of the filter. */
export function resize(image: Raster, width: number, height: number, filter: Filter): Raster {
  if (width === image.width && height === image.height) return image;
  if (filter === "nearest") return nearest(image, width, height);
  const columnsFirst = height < image.height && image.height - height > 2 * (image.width - width);
  const inBetween = columnsFirst ? resizeColumns(image, height, filter) : resizeRows(image, width, filter);
  return columnsFirst ? resizeRows(inBetween, width, filter) : resizeColumns(inBetween, height, filter);
}

/** Return a part of an image, within it. */
export function cropped(image: Raster, left: number, top: number, width: number, height: number): Raster {
  const { channels } = image;
  const data = new Uint8Array(width * height * channels);
  for (let y = 0; y < height; y++) {
    const begin = ((top + y) * image.width + left) * channels;
    data.set(image.data.subarray(begin, begin + width * channels), y * width * channels);
  }
  return { data, width, height, channels };
}

/** The source pixels of a target pixel, and their weights. */
interface Weights {
  readonly first: Int32Array; // of each target pixel
  readonly count: Int32Array;
  readonly size: number; // weights that are kept for each target pixel
  readonly weights: Int32Array;
}

function weightsOf(source: number, target: number, filter: Exclude<Filter, "nearest">): Weights {
  const [kernelSupport, kernel] = KERNELS[filter];
  const scale = source / target;
  const filterScale = Math.max(scale, 1);
  const support = kernelSupport * filterScale;
  const size = Math.ceil(support) * 2 + 1;
  const [first, count] = [new Int32Array(target), new Int32Array(target)];
  const weights = new Int32Array(target * size);
  const exact = new Float64Array(size);
  const step = 1 / filterScale;
  for (let i = 0; i < target; i++) {
    const center = (i + 0.5) * scale;
    const begin = Math.max(0, Math.trunc(center - support + 0.5));
    const end = Math.min(source, Math.trunc(center + support + 0.5));
    let sum = 0;
    for (let j = 0; j < end - begin; j++) {
      exact[j] = kernel((j + begin - center + 0.5) * step);
      sum += exact[j];
    }
    for (let j = 0; j < end - begin; j++) {
      const weight = (sum === 0 ? exact[j] : exact[j] / sum) * (1 << PRECISION_BITS);
      weights[i * size + j] = Math.trunc(weight + (weight < 0 ? -0.5 : 0.5));
    }
    first[i] = begin;
    count[i] = end - begin;
  }
  return { first, count, size, weights };
}

function resizeRows(image: Raster, target: number, filter: Exclude<Filter, "nearest">): Raster {
  const { data, width, height, channels } = image;
  if (width === target) return image;
  const { first, count, size, weights } = weightsOf(width, target, filter);
  const resized = new Uint8Array(target * height * channels);
  let at = 0;
  for (let row = 0; row < height; row++) {
    for (let x = 0; x < target; x++) {
      for (let channel = 0; channel < channels; channel++) {
        let sum = 1 << (PRECISION_BITS - 1);
        let from = (row * width + first[x]) * channels + channel;
        for (let i = x * size, end = i + count[x]; i < end; i++) {
          sum += data[from] * weights[i];
          from += channels;
        }
        resized[at++] = clipped(sum);
      }
    }
  }
  return { data: resized, width: target, height, channels };
}

function resizeColumns(image: Raster, target: number, filter: Exclude<Filter, "nearest">): Raster {
  const { data, width, height, channels } = image;
  if (height === target) return image;
  const { first, count, size, weights } = weightsOf(height, target, filter);
  const rowBytes = width * channels;
  const resized = new Uint8Array(target * rowBytes);
  const sums = new Int32Array(rowBytes);
  for (let y = 0; y < target; y++) {
    sums.fill(1 << (PRECISION_BITS - 1));
    for (let j = 0; j < count[y]; j++) {
      const weight = weights[y * size + j];
      const begin = (first[y] + j) * rowBytes;
      for (let x = 0; x < rowBytes; x++) sums[x] += data[begin + x] * weight;
    }
    for (let x = 0; x < rowBytes; x++) resized[y * rowBytes + x] = clipped(sums[x]);
  }
  return { data: resized, width, height: target, channels };
}

function clipped(sum: number): number {
  const value = sum >> PRECISION_BITS;
  return value < 0 ? 0 : value > 255 ? 255 : value;
}

/** Return the nearest pixels. Places are sums of steps, as in Pillow, whose rounding decides between two of them. */
function nearest({ data, width: sourceWidth, height: sourceHeight, channels }: Raster, width: number, height: number) {
  const columns = nearestPlaces(sourceWidth, width);
  const rows = nearestPlaces(sourceHeight, height);
  const resized = new Uint8Array(width * height * channels);
  let at = 0;
  for (const row of rows) {
    for (const column of columns) {
      const from = (row * sourceWidth + column) * channels;
      for (let channel = 0; channel < channels; channel++) {
        resized[at++] = row < sourceHeight && column < sourceWidth ? data[from + channel] : 0;
      }
    }
  }
  return { data: resized, width, height, channels };
}

function nearestPlaces(source: number, target: number): Int32Array {
  const step = source / target;
  let place = step * 0.5;
  return Int32Array.from({ length: target }, () => {
    const whole = Math.trunc(place);
    place += step;
    return whole;
  });
}

function hamming(x: number): number {
  const distance = Math.abs(x);
  if (distance === 0) return 1;
  if (distance >= 1) return 0;
  const angle = distance * Math.PI;
  return (Math.sin(angle) / angle) * (HAMMING_MEAN + HAMMING_AMPLITUDE * Math.cos(angle));
}

function bicubic(x: number): number {
  const distance = Math.abs(x);
  if (distance < 1) return ((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1;
  if (distance < 2) return (((distance - 5) * distance + 8) * distance - 4) * CUBIC;
  return 0;
}

function sinc(x: number): number {
  return x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI);
}
