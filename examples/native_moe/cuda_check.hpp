#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

inline void cuda_check(cudaError_t code, const char* what) {
    if (code != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
}
#define CUDA_CHECK(call) cuda_check((call), #call)
