// The Marlin MoE kernel, called without Python: the compiled module's tvm-ffi export, found with dlopen.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

// Tokens sorted by expert in blocks, in device memory; made by align() in moe_kernels.hpp.
struct Alignment {
    const int32_t* sorted_token_ids;  // [capacity]
    const int32_t* expert_ids;        // [capacity / block_size, rounded up]
    const int32_t* num_tokens_post_padded;
    int64_t capacity;
    int64_t block_size;
};

// One projection of all local experts, in device memory as it lies in the shard.
struct Matrix {
    const int32_t* words;  // [experts, size_k / 16, 2 * size_n]
    const void* scales;    // bf16 [experts, groups, size_n]
    int64_t experts, groups, size_k, size_n;
};

// Row r of the result [rows * top_k, size_n] is row r / top_k of `a` times the matrix of the expert chosen for r.
struct GemmCall {
    const void* a;  // bf16 [rows, size_k]
    void* c;        // bf16 [rows * top_k, size_n]; rows in no block stay as they are
    Matrix matrix;
    Alignment alignment;
    const float* topk_weights;  // [tokens * topk]
    int64_t rows, top_k;
    bool multiply_weights;
};

class MarlinGemm {
  public:
    // `module`: the shared object compiled for bf16 activations, is_ep false, no bias.
    MarlinGemm(const std::string& module, int device);
    ~MarlinGemm();
    MarlinGemm(const MarlinGemm&) = delete;
    MarlinGemm& operator=(const MarlinGemm&) = delete;

    // Enqueues on the stream; one stream at a time, since calls share locks and scratch memory. Throws with the
    // kernel's own message if it refuses the shapes.
    void operator()(const GemmCall& call, cudaStream_t stream) const;

  private:
    void* module_ = nullptr;
    void* function_ = nullptr;
    int device_;
    int64_t multiprocessors_ = 0;
    int32_t* locks_ = nullptr;    // zero between calls
    float* scratch_ = nullptr;    // where thread blocks that share an output add up in float32
    int64_t scratch_size_ = 0;
};
