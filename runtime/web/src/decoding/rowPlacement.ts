/** Places of rows that continue other rows, so that few rows must be copied. */

/**
 * Return the place of each row among 0 … n-1, and the present row that each place continues.
 *
 * parents: the present row that each row continues. A row takes the place of its parent if possible.
 * requests: the number of the request of each present row. Rows of one request become neighbours if all requests have
 *     the same number of rows. Otherwise, and without `requests`, rows may go anywhere.
 */
export function placeRows(parents: Int32Array, requests?: Int32Array): { places: Int32Array; order: Int32Array } {
  let places = assignPlaces(parents);
  if (requests) {
    const own = Array.from(parents, (row) => requests[row]);
    const distinct = [...new Set(own)];
    const size = own.length / distinct.length;
    const counts = new Map<number, number>();
    for (const request of own) counts.set(request, (counts.get(request) ?? 0) + 1);
    if (size > 1 && [...counts.values()].every((count) => count === size)) {
      const firstParents = Int32Array.from(distinct, (request) => Math.floor(parents[own.indexOf(request)] / size));
      const blocks = assignPlaces(firstParents);
      places = assignPlaces(
        parents,
        size,
        Int32Array.from(own, (request) => blocks[distinct.indexOf(request)]),
      );
    }
  }
  const order = new Int32Array(parents.length);
  places.forEach((place, i) => (order[place] = parents[i]));
  return { places, order };
}

/**
 * Return a place for each row: the place of its parent, if that is one of 0 … n-1 and no earlier row has it, or else a
 * free place.
 *
 * blocks: the block of `size` places in which each row must be. Every block has as many rows as places.
 */
function assignPlaces(parents: Int32Array, size = parents.length, blocks?: Int32Array): Int32Array {
  const count = parents.length;
  const places = new Int32Array(count).fill(-1);
  const taken = new Uint8Array(count);
  const blockOf = (i: number) => (blocks ? blocks[i] : 0);
  for (let i = 0; i < count; i++) {
    const place = parents[i];
    if (place >= count || taken[place] || (blocks && Math.floor(place / size) !== blocks[i])) continue;
    places[i] = place;
    taken[place] = 1;
  }
  for (let i = 0; i < count; i++) {
    if (places[i] >= 0) continue;
    let place = blockOf(i) * size;
    while (taken[place]) place++;
    places[i] = place;
    taken[place] = 1;
  }
  return places;
}
