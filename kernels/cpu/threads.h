// A few threads that take numbered pieces of work, each from its own share first; between calls they spin briefly, then
// park.
#pragma once
#include <algorithm>
#include <cstdint>

namespace baton {

using Piece = void (*)(void* context, int64_t index);

void run_pieces(int64_t num_items, int num_threads, Piece piece, void* context);

// Calls body(0) .. body(num_items - 1), each once, on the caller and up to num_threads - 1 helpers; returns when
// all are done. The caller takes pieces too and waits only for helpers that have come, so a helper that the
// system does not schedule costs nothing. One call at a time; concurrent callers wait for each other.
// `body` must not throw.
template <typename Body>
void parallel_for(int64_t num_items, int num_threads, const Body& body) {
  if (num_threads <= 1 || num_items <= 1) {
    for (int64_t i = 0; i < num_items; ++i) body(i);
    return;
  }
  run_pieces(num_items, num_threads, [](void* context, int64_t i) { (*static_cast<const Body*>(context))(i); },
             const_cast<Body*>(&body));
}

constexpr int64_t PIECE_ROWS = 8;  // rows of a piece of row-wise work

// body(0) .. body(num_rows - 1), PIECE_ROWS of them in a piece.
template <typename Body>
void each_row(int64_t num_rows, int num_threads, const Body& body) {
  parallel_for((num_rows + PIECE_ROWS - 1) / PIECE_ROWS, num_threads, [&](int64_t piece) {
    for (int64_t r = piece * PIECE_ROWS; r < std::min(num_rows, (piece + 1) * PIECE_ROWS); ++r) body(r);
  });
}

}  // namespace baton
