// What stands around the two grouped matrix products of the routed experts. All enqueue on the stream and never wait.
//
// A choice is one of the tokens * top_k pairs of token and expert; its number is token * top_k + j. Choices of experts
// outside [first, first + experts) belong to other ranks and are skipped everywhere.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

struct Routing {
    const int32_t* topk_ids;  // [tokens, top_k], numbers in the whole model
    int tokens, top_k;
    int first, experts;  // of this rank
    int choices() const { return tokens * top_k; }
};

// Room in sorted_token_ids that is enough for any routing.
int64_t alignment_capacity(const Routing& routing, int block_size);

// Sorts choices by expert, each expert padded to whole blocks with the number choices(). Stable, so repeatable.
void align(const Routing& routing, int block_size, int32_t* sorted_token_ids, int32_t* expert_ids,
           int32_t* num_tokens_post_padded, cudaStream_t stream);

// [choices, 2 * width] to [choices, width]: silu of the first half of a row times the second. width % 8 == 0.
void silu_and_mul(const Routing& routing, const __nv_bfloat16* in, int width, __nv_bfloat16* out, cudaStream_t stream);

// [choices, width] to [tokens, width]: the sum over a token's choices on this rank. width % 8 == 0.
void sum_choices(const Routing& routing, const __nv_bfloat16* in, int width, __nv_bfloat16* out, cudaStream_t stream);
