// A few threads that take numbered pieces of work from one counter, and sleep in between.
#pragma once
#include <cstdint>
#include <functional>

namespace baton {

// Calls body(0) .. body(num_items - 1), each once, on the caller and up to num_threads - 1 helpers.
// Returns when all are done. Helpers start at first need and then wait on a condition variable.
// One call at a time; concurrent callers wait for each other.
void parallel_for(int64_t num_items, int num_threads, const std::function<void(int64_t)>& body);

}  // namespace baton
