// The routed experts of one layer on one rank: alignment, w13, silu, w2, sum.
#pragma once

#include "gpu_loader.hpp"
#include "marlin_gemm.hpp"
#include "moe_kernels.hpp"

// Device memory that is freed with it.
template <class T> class DeviceArray {
  public:
    explicit DeviceArray(std::size_t count);
    ~DeviceArray() { cudaFree(data_); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;
    T* get() const { return data_; }

  private:
    T* data_ = nullptr;
};

// The kernel's block size: the first that an average expert's tokens fill to less than 0.9, else the largest.
int choose_block_size(int tokens, int top_k, int experts);

class RoutedExperts {
  public:
    // Everything a call of up to `max_tokens` needs is allocated here.
    RoutedExperts(const marlin::Experts& experts, const marlin::GpuShards& loaded, const MarlinGemm& gemm, int max_tokens, int top_k);

    int hidden() const { return static_cast<int>(w13_.size_k); }
    int block_size(int tokens) const { return choose_block_size(tokens, top_k_, experts_); }

    // `out` [tokens, hidden] becomes this rank's share of the sum over each token's experts. Only enqueues.
    void operator()(const __nv_bfloat16* x, const int32_t* topk_ids, const float* topk_weights, int tokens, __nv_bfloat16* out,
                    cudaStream_t stream) const;

  private:
    const MarlinGemm& gemm_;
    int first_, experts_, top_k_, max_tokens_;
    Matrix w13_, w2_;
    DeviceArray<int32_t> sorted_, block_experts_, listed_;
    DeviceArray<__nv_bfloat16> c1_, c2_, c3_;
};
