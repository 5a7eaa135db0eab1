#include "routed_experts.hpp"

#include "cuda_check.hpp"

template <class T> DeviceArray<T>::DeviceArray(std::size_t count) { CUDA_CHECK(cudaMalloc(&data_, count * sizeof(T))); }
template class DeviceArray<int32_t>;
template class DeviceArray<float>;
template class DeviceArray<__nv_bfloat16>;

namespace {

constexpr int kBlockSizes[] = {8, 16, 32, 48, 64};

// A projection where it was loaded: the file's bytes are what the kernel reads.
Matrix matrix(const marlin::GpuShards& loaded, const marlin::Tensor& words, const marlin::Tensor& scales) {
    return {loaded.address<int32_t>(words), loaded.address<marlin::bf16>(scales), static_cast<int64_t>(words.shape[0]),
            static_cast<int64_t>(scales.shape[1]), static_cast<int64_t>(16 * words.shape[1]),
            static_cast<int64_t>(words.shape[2] / 2)};
}

std::size_t most_places(int max_tokens, int top_k, int experts) {
    const Routing largest{nullptr, max_tokens, top_k, 0, experts};
    return static_cast<std::size_t>(alignment_capacity(largest, kBlockSizes[4]));
}

}  // namespace

int choose_block_size(int tokens, int top_k, int experts) {
    const double share = static_cast<double>(tokens) * top_k / experts;
    for (int size : kBlockSizes) {
        if (share / size < 0.9) return size;
    }
    return kBlockSizes[4];
}

RoutedExperts::RoutedExperts(const marlin::Experts& experts, const marlin::GpuShards& loaded, const MarlinGemm& gemm,
                             int max_tokens, int top_k)
    : gemm_(gemm),
      first_(static_cast<int>(experts.first)),
      experts_(static_cast<int>(experts.count)),
      top_k_(top_k),
      max_tokens_(max_tokens),
      w13_(matrix(loaded, experts.w13_packed, experts.w13_scale)),
      w2_(matrix(loaded, experts.w2_packed, experts.w2_scale)),
      sorted_(most_places(max_tokens, top_k, experts_)),
      block_experts_(most_places(max_tokens, top_k, experts_)),
      listed_(1),
      c1_(static_cast<std::size_t>(max_tokens * top_k) * static_cast<std::size_t>(w13_.size_n)),
      c2_(static_cast<std::size_t>(max_tokens * top_k) * static_cast<std::size_t>(w2_.size_k)),
      c3_(static_cast<std::size_t>(max_tokens * top_k) * static_cast<std::size_t>(w2_.size_n)) {}

void RoutedExperts::operator()(const __nv_bfloat16* x, const int32_t* topk_ids, const float* topk_weights, int tokens,
                               __nv_bfloat16* out, cudaStream_t stream) const {
    if (tokens < 1 || tokens > max_tokens_) throw std::invalid_argument("more tokens than were allowed for");
    const Routing routing{topk_ids, tokens, top_k_, first_, experts_};
    const int block = block_size(tokens);
    const Alignment alignment{sorted_.get(), block_experts_.get(), listed_.get(), alignment_capacity(routing, block), block};
    align(routing, block, sorted_.get(), block_experts_.get(), listed_.get(), stream);
    gemm_({x, c1_.get(), w13_, alignment, topk_weights, tokens, top_k_, false}, stream);
    silu_and_mul(routing, c1_.get(), static_cast<int>(w2_.size_k), c2_.get(), stream);
    // From here on every choice is a row of its own; the router's weights are applied in this product.
    gemm_({c2_.get(), c3_.get(), w2_, alignment, topk_weights, routing.choices(), 1, true}, stream);
    sum_choices(routing, c3_.get(), static_cast<int>(w2_.size_n), out, stream);
}
