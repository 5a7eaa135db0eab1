#include "moe_kernels.hpp"

#include <algorithm>

#include "cuda_check.hpp"

namespace {

constexpr int kWarp = 32, kWarps = 8, kThreads = kWarp * kWarps;
constexpr int kVector = 8;  // bf16 values in 16 bytes

__device__ bool is_local(int id, int first, int experts) {
    return static_cast<unsigned>(id - first) < static_cast<unsigned>(experts);
}

struct alignas(16) Eight {
    __nv_bfloat162 pair[kVector / 2];
};

__device__ void to_float(const Eight& from, float (&to)[kVector]) {
    for (int i = 0; i < kVector / 2; ++i) {
        const float2 two = __bfloat1622float2(from.pair[i]);
        to[2 * i] = two.x;
        to[2 * i + 1] = two.y;
    }
}

__device__ Eight to_bf16(const float (&from)[kVector]) {
    Eight to;
    for (int i = 0; i < kVector / 2; ++i) to.pair[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
    return to;
}

// One warp an expert. Every thread block counts all experts for itself, so that none waits for another and one launch
// does; that is cheap for the tokens of a decode step, and not meant for long prefills.
__global__ void align_kernel(Routing routing, int choices, int block_size, int* sorted, int* block_experts, int* listed) {
    extern __shared__ int shared[];
    const int experts = routing.experts, first = routing.first;
    int* counts = shared;            // [experts]
    int* starts = shared + experts;  // [experts + 1], in padded places
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < choices; i += blockDim.x) {
        const int id = routing.topk_ids[i];
        if (is_local(id, first, experts)) atomicAdd(&counts[id - first], 1);
    }
    __syncthreads();
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    if (warp == 0) {
        // Each lane takes a run of experts; the lanes' sums are scanned, then each run is filled.
        const int run = (experts + kWarp - 1) / kWarp;
        const int begin = min(lane * run, experts), end = min(begin + run, experts);
        int sum = 0;
        for (int e = begin; e < end; ++e) sum += (counts[e] + block_size - 1) / block_size * block_size;
        int inclusive = sum;
        for (int step = 1; step < kWarp; step *= 2) {
            const int other = __shfl_up_sync(~0u, inclusive, step);
            if (lane >= step) inclusive += other;
        }
        int start = inclusive - sum;
        for (int e = begin; e < end; ++e) {
            starts[e] = start;
            start += (counts[e] + block_size - 1) / block_size * block_size;
        }
        if (lane == kWarp - 1) starts[experts] = inclusive;
    }
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) *listed = starts[experts];
    const int expert = static_cast<int>(blockIdx.x) * kWarps + warp;
    if (expert >= experts || counts[expert] == 0) return;
    const int begin = starts[expert], end = starts[expert + 1];
    int place = begin;
    for (int base = 0; base < choices; base += kWarp) {
        const int i = base + lane;
        const bool match = i < choices && routing.topk_ids[i] - first == expert;
        const unsigned matches = __ballot_sync(~0u, match);
        if (match) sorted[place + __popc(matches & ((1u << lane) - 1))] = i;
        place += __popc(matches);
    }
    for (int i = place + lane; i < end; i += kWarp) sorted[i] = choices;
    for (int i = begin / block_size + lane; i < end / block_size; i += kWarp) block_experts[i] = expert;
}

__global__ void silu_kernel(Routing routing, int width, const Eight* in, Eight* out) {
    const int vectors = width / kVector, choice = blockIdx.x;
    // Rows of other ranks' choices were never written.
    if (!is_local(routing.topk_ids[choice], routing.first, routing.experts)) return;
    const int64_t row = choice;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        float gate[kVector], up[kVector];
        to_float(in[2 * row * vectors + i], gate);
        to_float(in[(2 * row + 1) * vectors + i], up);
        for (int j = 0; j < kVector; ++j) gate[j] = gate[j] / (1.0f + __expf(-gate[j])) * up[j];
        out[row * vectors + i] = to_bf16(gate);
    }
}

__global__ void sum_kernel(Routing routing, int width, const Eight* in, Eight* out) {
    const int vectors = width / kVector, token = blockIdx.x;
    const int i = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= vectors) return;
    float total[kVector] = {};
    for (int j = 0; j < routing.top_k; ++j) {
        const int64_t choice = static_cast<int64_t>(token) * routing.top_k + j;
        if (!is_local(routing.topk_ids[choice], routing.first, routing.experts)) continue;
        float one[kVector];
        to_float(in[choice * vectors + i], one);
        for (int k = 0; k < kVector; ++k) total[k] += one[k];
    }
    out[static_cast<int64_t>(token) * vectors + i] = to_bf16(total);
}

}  // namespace

int64_t alignment_capacity(const Routing& routing, int block_size) {
    // An expert that is named at all wastes at most block_size - 1 places.
    const int64_t choices = routing.choices();
    return choices + std::min<int64_t>(choices, routing.experts) * (block_size - 1);
}

void align(const Routing& routing, int block_size, int32_t* sorted_token_ids, int32_t* expert_ids,
           int32_t* num_tokens_post_padded, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>((routing.experts + kWarps - 1) / kWarps);
    const auto shared = static_cast<std::size_t>(2 * routing.experts + 1) * sizeof(int);
    align_kernel<<<blocks, kThreads, shared, stream>>>(routing, routing.choices(), block_size, sorted_token_ids, expert_ids,
                                                       num_tokens_post_padded);
    CUDA_CHECK(cudaGetLastError());
}

void silu_and_mul(const Routing& routing, const __nv_bfloat16* in, int width, __nv_bfloat16* out, cudaStream_t stream) {
    const auto threads = static_cast<unsigned>(std::min(256, (width / kVector + kWarp - 1) / kWarp * kWarp));
    silu_kernel<<<static_cast<unsigned>(routing.choices()), threads, 0, stream>>>(
        routing, width, reinterpret_cast<const Eight*>(in), reinterpret_cast<Eight*>(out));
    CUDA_CHECK(cudaGetLastError());
}

void sum_choices(const Routing& routing, const __nv_bfloat16* in, int width, __nv_bfloat16* out, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(routing.tokens), static_cast<unsigned>((width / kVector + 127) / 128));
    sum_kernel<<<grid, 128, 0, stream>>>(routing, width, reinterpret_cast<const Eight*>(in), reinterpret_cast<Eight*>(out));
    CUDA_CHECK(cudaGetLastError());
}
