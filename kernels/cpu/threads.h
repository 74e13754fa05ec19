// A few threads that take numbered pieces of work from one counter; between calls they spin briefly, then park.
#pragma once
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

}  // namespace baton
