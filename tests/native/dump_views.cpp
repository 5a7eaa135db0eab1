// dump_views --files FILE...: for each, opened as a safetensors file alone, "ok" or why not, a line each.
// dump_views OUT RANK: what the reader gives, as JSON, for test_native_loader.py to compare with Python's reading.
// Also calls the reader in ways that it must refuse; each must raise, and is listed with its message.
#include <cstdio>
#include <functional>

#include "marlin_digest.hpp"

namespace {

using marlin::Json;

Json describe(const marlin::Tensor& tensor) {
    return {{"name", tensor.name},
            {"dtype", marlin::info(tensor.dtype).name},
            {"shape", tensor.shape},
            {"offset", tensor.offset},
            {"digest", marlin::hex(marlin::digest(tensor.data, tensor.size))}};
}

template <class T> double total(const marlin::Tensor& tensor) {
    double sum = 0;
    for (const T& value : tensor.view<T>()) sum += static_cast<double>(static_cast<float>(value));
    return sum;
}

Json describe(const marlin::Experts& experts) {
    Json out = {{"first", experts.first},
                {"count", experts.count},
                {"hidden", experts.hidden},
                {"intermediate", experts.intermediate},
                {"each", Json::array()}};
    for (uint64_t number = experts.first; number < experts.first + experts.count; ++number) {
        const marlin::Expert expert = experts.expert(number);
        out["each"].push_back({describe(expert.w13_packed), describe(expert.w13_scale), describe(expert.w2_packed),
                               describe(expert.w2_scale), total<marlin::bf16>(expert.w2_scale)});
    }
    return out;
}

Json refused(const std::vector<std::function<void()>>& calls) {
    Json messages = Json::array();
    for (const auto& call : calls) {
        try {
            call();
            messages.push_back(nullptr);
        } catch (const std::exception& error) {
            messages.push_back(error.what());
        }
    }
    return messages;
}

int open_files(int count, char** paths) {
    for (int i = 0; i < count; ++i) {
        try {
            const marlin::TensorFile file(paths[i]);
            uint64_t bytes = 0;
            for (const marlin::Tensor& tensor : file.tensors()) {
                bytes += std::to_integer<uint64_t>(tensor.data[0]) + std::to_integer<uint64_t>(tensor.data[tensor.size - 1]);
            }
            std::printf("ok %llu\n", static_cast<unsigned long long>(bytes));
        } catch (const marlin::Error& error) {
            std::printf("%s\n", error.what());
        }
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && std::string(argv[1]) == "--files") return open_files(argc - 2, argv + 2);
    if (argc != 3) return 2;
    try {
        const marlin::Output out(argv[1]);
        // Moved once more than needed: views must survive it.
        marlin::Rank opened = out.open_rank(std::atoi(argv[2]));
        const marlin::Rank rank = std::move(opened);
        Json result = {{"shards", Json::array()},
                       {"hidden_size", out.manifest().constant<int>("hidden_size")},
                       {"rms_norm_eps", out.manifest().constant<double>("rms_norm_eps")},
                       {"rope_type", out.manifest().constant<std::string>("rope_scaling.type")}};
        for (const marlin::Shard& shard : rank.shards()) {
            Json one = {{"path", shard.entry().path}, {"tensors", Json::array()}, {"fused", Json::array()}};
            for (const marlin::Tensor& tensor : shard.tensors()) {
                one["tensors"].push_back(describe(tensor));
                const marlin::Tensor* found = tensor.is_filler() ? &tensor : rank.find(tensor.name);
                if (found != &tensor) throw std::logic_error("not found by its name: " + tensor.name);
            }
            for (const auto& view : shard.entry().fused) one["fused"].push_back(describe(shard.fused(view.name)));
            if (shard.experts()) one["experts"] = describe(*shard.experts());
            result["shards"].push_back(std::move(one));
        }
        const marlin::Shard& layer = rank.layer(1);
        const marlin::Experts& experts = *layer.experts();
        result["refused"] = refused({
            [&] { experts.w13_packed.view<float>(); },
            [&] { experts.w13_scale.view<int32_t>(); },
            [&] { experts.expert(experts.first + experts.count); },
            [&] { if (experts.first > 0) experts.expert(experts.first - 1); else experts.expert(UINT64_MAX); },
            [&] { experts.w2_packed.part(experts.count); },
            [&] { rank.layer(99); },
            [&] { rank.tensor("no.such.tensor"); },
            [&] { layer.fused("no.such.view"); },
            [&] { out.manifest().constant<int>("no_such_constant"); },
            [&] { out.manifest().constant<int>("model_type"); },
        });
        std::printf("%s\n", result.dump().c_str());
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
