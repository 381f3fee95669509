// Memory that each thread keeps for linear layers.

#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

// Scratch of the calling thread, grown and kept until the thread ends.
struct Scratch {
    char* memory = nullptr;
    int64_t bytes = 0;
    ~Scratch() { std::free(memory); }
    char* at_least(int64_t wanted) {
        if (wanted > bytes) {
            std::free(memory);
            bytes = (wanted + 4095) / 4096 * 4096;
            memory = static_cast<char*>(std::aligned_alloc(4096, bytes));
            if (!memory) std::abort();
        }
        return memory;
    }
};
thread_local Scratch packed_scratch, tile_scratch;

}  // namespace
