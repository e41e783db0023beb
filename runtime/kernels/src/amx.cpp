// AMX: TDPBUSD multiplies 16 rows with 16 columns, 64 numbers deep. For fewer rows than a tile AVX-512 VNNI is as fast, and
// has the same layout.
#include <immintrin.h>

#include "amx_tiles.h"
#include "avx512_floats.h"
#include "avx512_rows.h"
#include "paths.h"

namespace tformer {
namespace {

constexpr size_t TILE = 16;         // rows, and columns of sums
constexpr size_t TILE_BYTES = 64;   // of a row
constexpr size_t TILE_GROUPS = 16;  // rows of a tile of weights

// Tiles 0 to 3 are sums of two blocks of rows and two panels, 4 and 5 activations, 6 and 7 weights.
void configure(size_t first_rows, size_t second_rows) {
  TileShapes shapes{};
  auto set = [&](int tile, size_t rows) {
    shapes.rows[tile] = static_cast<uint8_t>(rows);
    shapes.bytes[tile] = rows ? TILE_BYTES : 0;
  };
  for (int tile : {0, 1, 4}) set(tile, first_rows);
  for (int tile : {2, 3, 5}) set(tile, second_rows);
  for (int tile : {6, 7}) set(tile, TILE_GROUPS);
  load_shapes(shapes);
}

// One or two blocks of rows times two panels.
template <bool TWO_BLOCKS>
void multiply_tiles(const uint8_t* q, size_t inner, const uint8_t* weights, int32_t* sums) {
  clear_tile<0>();
  clear_tile<1>();
  if constexpr (TWO_BLOCKS) {
    clear_tile<2>();
    clear_tile<3>();
  }
  const uint8_t* others = weights + inner * PANEL;
  for (size_t k = 0; k < inner; k += TILE_BYTES) {
    load_tile<6>(weights + k * PANEL, GROUP_BYTES);
    load_tile<7>(others + k * PANEL, GROUP_BYTES);
    load_tile<4>(q + k, inner);
    add_products<0, 4, 6>();
    add_products<1, 4, 7>();
    if constexpr (TWO_BLOCKS) {
      load_tile<5>(q + TILE * inner + k, inner);
      add_products<2, 5, 6>();
      add_products<3, 5, 7>();
    }
  }
  constexpr size_t stride = 2 * PANEL * sizeof(int32_t);
  store_tile<0>(sums, stride);
  store_tile<1>(sums + PANEL, stride);
  if constexpr (TWO_BLOCKS) {
    store_tile<2>(sums + TILE * 2 * PANEL, stride);
    store_tile<3>(sums + TILE * 2 * PANEL + PANEL, stride);
  }
}

// All rows times two panels. panel: the first of them; weights: both, in the layout of 8 bits.
void multiply_panels(const Tile& tile, size_t block, size_t rows, size_t panel, const uint8_t* weights) {
  alignas(ALIGNMENT) int32_t sums[2 * TILE * 2 * PANEL];
  const size_t inner = tile.matrix->padded_inner;
  (rows > TILE ? multiply_tiles<true> : multiply_tiles<false>)(tile.rows + block * inner, inner, weights, sums);
  store_sums(tile, block, rows, panel, 2, sums);
}

// Calls body(first row, rows) for blocks of at most two tiles, with tiles of their shape.
template <class Body>
void for_row_blocks(const Tile& tile, const Body& body) {
  for (size_t begin = tile.row_begin; begin < tile.row_end; begin += 2 * TILE) {
    const size_t left = tile.row_end - begin, rows = left < 2 * TILE ? left : 2 * TILE;
    configure(rows < TILE ? rows : TILE, rows > TILE ? rows - TILE : 0);
    body(begin, rows);
  }
  release_tiles();
}

size_t pairs_end(const Tile& tile) {
  return tile.panel_begin + (tile.panel_end - tile.panel_begin) / 2 * 2;
}

// The last panel of an odd number.
Tile last_panel(const Tile& tile) {
  Tile last = tile;
  last.panel_begin = pairs_end(tile);
  return last;
}

void multiply8(const Tile& tile) {
  if (tile.row_end - tile.row_begin < TILE) return AVX512_VNNI.multiply8(tile);
  for_row_blocks(tile, [&](size_t begin, size_t rows) {
    for (size_t p = tile.panel_begin; p < pairs_end(tile); p += 2)
      multiply_panels(tile, begin, rows, p, tile.matrix->panel(p));
  });
  if (pairs_end(tile) < tile.panel_end) AVX512_VNNI.multiply8(last_panel(tile));
}

void multiply4(const Tile& tile) {
  if (tile.row_end - tile.row_begin < TILE) return AVX512_VNNI.multiply4(tile);
  const size_t bytes = tile.matrix->padded_inner * PANEL;
  uint8_t* weights = expanded_panels(2 * bytes);
  for (size_t p = tile.panel_begin; p < pairs_end(tile); p += 2) {
    expand_panel_avx512(*tile.matrix, p, weights);
    expand_panel_avx512(*tile.matrix, p + 1, weights + bytes);
    for_row_blocks(tile, [&](size_t begin, size_t rows) { multiply_panels(tile, begin, rows, p, weights); });
  }
  if (pairs_end(tile) < tile.panel_end) AVX512_VNNI.multiply4(last_panel(tile));
}

bool supported() { return AVX512_VNNI.supported() && may_use_tiles(); }

}  // namespace

constinit const Path AMX = {"amx", supported, TILE_BYTES, STREAM_ROWS_4, false, quantise_avx512, multiply8, multiply4,
                            FLOAT_COLUMNS, multiply_float_avx512, attend_avx512, rotate_avx2,
                            &ELEMENTWISE_AVX512};

}  // namespace tformer
