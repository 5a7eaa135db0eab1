#include "marlin_gemm.hpp"

#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <array>
#include <initializer_list>
#include <stdexcept>

#include "cuda_check.hpp"

namespace {

constexpr const char* kSymbol = "__tvm_ffi_moe_wna16_marlin_gemm";
constexpr int64_t kUint4b8 = 1125899907892224;  // the manifest's layout.b_q_type_id
constexpr int64_t kMaxThreadN = 256, kMaxBlock = 64, kBlocksPerMultiprocessor = 4;

// A contiguous tensor in device memory that somebody else owns.
class Borrowed {
  public:
    Borrowed(const void* data, DLDataType dtype, int device, std::initializer_list<int64_t> shape) {
        int dimensions = 0;
        for (int64_t extent : shape) shape_[static_cast<std::size_t>(dimensions++)] = extent;
        int64_t stride = 1;
        for (int i = dimensions - 1; i >= 0; --i) {
            strides_[static_cast<std::size_t>(i)] = stride;
            stride *= shape_[static_cast<std::size_t>(i)];
        }
        tensor_ = {const_cast<void*>(data), {kDLCUDA, device}, dimensions, dtype, shape_.data(), strides_.data(), 0};
    }
    Borrowed(const Borrowed&) = delete;  // the tensor points into it
    Borrowed& operator=(const Borrowed&) = delete;
    DLTensor* get() { return &tensor_; }

  private:
    std::array<int64_t, 3> shape_{}, strides_{};
    DLTensor tensor_{};
};

}  // namespace

MarlinGemm::MarlinGemm(const std::string& module, int device) : device_(device) {
    module_ = ::dlopen(module.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (module_ == nullptr) throw std::runtime_error(std::string("the kernel's module does not load: ") + ::dlerror());
    function_ = ::dlsym(module_, kSymbol);
    if (function_ == nullptr) throw std::runtime_error(module + " has no " + kSymbol);
    int count = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    multiprocessors_ = count;
    // Both for the largest call there can be on this GPU, so that no call allocates.
    scratch_size_ = multiprocessors_ * kBlocksPerMultiprocessor * kMaxBlock * kMaxThreadN;
    CUDA_CHECK(cudaMalloc(&scratch_, static_cast<std::size_t>(scratch_size_) * sizeof(float)));
    const auto locks = static_cast<std::size_t>(multiprocessors_ * kBlocksPerMultiprocessor) * sizeof(int32_t);
    CUDA_CHECK(cudaMalloc(&locks_, locks));
    CUDA_CHECK(cudaMemset(locks_, 0, locks));
    CUDA_CHECK(cudaDeviceSynchronize());  // calls may come on a stream that does not wait for the default one
}

MarlinGemm::~MarlinGemm() {
    cudaFree(locks_);
    cudaFree(scratch_);
    // The module stays loaded: its kernels are registered with the CUDA runtime until the process ends.
}

void MarlinGemm::operator()(const GemmCall& call, cudaStream_t stream) const {
    const DLDataType bf16{kDLBfloat, 16, 1}, i32{kDLInt, 32, 1}, f32{kDLFloat, 32, 1};
    const Matrix& matrix = call.matrix;
    const Alignment& alignment = call.alignment;
    const int64_t blocks = (alignment.capacity + alignment.block_size - 1) / alignment.block_size;

    Borrowed a(call.a, bf16, device_, {call.rows, matrix.size_k});
    Borrowed c(call.c, bf16, device_, {call.rows * call.top_k, matrix.size_n});
    Borrowed words(matrix.words, i32, device_, {matrix.experts, matrix.size_k / 16, 2 * matrix.size_n});
    Borrowed scales(matrix.scales, bf16, device_, {matrix.experts, matrix.groups, matrix.size_n});
    Borrowed locks(locks_, i32, device_, {multiprocessors_ * kBlocksPerMultiprocessor});
    Borrowed scratch(scratch_, f32, device_, {scratch_size_});
    Borrowed sorted(alignment.sorted_token_ids, i32, device_, {alignment.capacity});
    Borrowed experts(alignment.expert_ids, i32, device_, {blocks});
    Borrowed listed(alignment.num_tokens_post_padded, i32, device_, {1});
    Borrowed weights(call.topk_weights, f32, device_, {call.multiply_weights ? call.rows * call.top_k : 1});
    Borrowed no_bf16(nullptr, bf16, device_, {0}), no_i32(nullptr, i32, device_, {0});

    // The kernel takes its stream from tvm-ffi's table, which is this thread's own.
    if (TVMFFIEnvSetStream(kDLCUDA, device_, stream, nullptr) != 0) throw std::runtime_error("the stream was refused");
    const auto function = reinterpret_cast<TVMFFISafeCallType>(function_);
    tvm::ffi::Function::InvokeExternC(
        nullptr, function,
        a.get(), c.get(), words.get(),
        no_bf16.get(),  // b_bias
        scales.get(),
        no_bf16.get(),  // global_scale
        no_bf16.get(),  // b_zeros
        no_i32.get(),   // g_idx
        no_i32.get(),   // perm
        locks.get(), sorted.get(), experts.get(), listed.get(), weights.get(),
        no_bf16.get(),  // a_tmp, for act-order
        scratch.get(),
        alignment.block_size, call.top_k, call.multiply_weights,
        false,  // is_ep: choices of other ranks are in no block
        kUint4b8, call.rows, matrix.size_n, matrix.size_k,
        false,  // has_act_order
        false,  // has_bias
        true,   // is_k_full
        false,  // has_zp
        matrix.groups, matrix.groups > 1 ? matrix.size_k / matrix.groups : int64_t{-1},
        false,  // use_atomic_add: the sums have a fixed order
        true,   // use_fp32_reduce
        false); // is_zp_float
}
