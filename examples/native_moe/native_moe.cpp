// native_moe OUT RANK LAYER --kernel MODULE.so --input IO.safetensors: loads a converted layer of a rank, runs its routed
// experts through the Marlin MoE kernel, and compares with outputs computed from the original checkpoint.
// Prints JSON. Exit code 0: all within tolerance; 1: not, or something failed; 2: usage.
#include <cmath>
#include <cstdio>

#include "arguments.hpp"
#include "cuda_check.hpp"
#include "routed_experts.hpp"

namespace {

constexpr double kTolerance = 1e-2;  // relative, in the Frobenius norm: two bf16 products and their staging give 5e-3
constexpr int kReplays = 100, kWarmUps = 10;

class Stream {
  public:
    Stream() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream() { cudaStreamDestroy(stream_); }
    cudaStream_t get() const { return stream_; }
    void wait() const { CUDA_CHECK(cudaStreamSynchronize(stream_)); }

  private:
    cudaStream_t stream_ = nullptr;
};

// The inputs and the expected output for one number of tokens.
struct Case {
    int tokens;
    marlin::Tensor x, ids, weights, expected;
};

std::vector<Case> cases_of(const marlin::TensorFile& file) {
    std::vector<Case> cases;
    for (const marlin::Tensor& tensor : file.tensors()) {
        const std::string end = ".expected";
        if (tensor.name.size() <= end.size() || tensor.name.substr(tensor.name.size() - end.size()) != end) continue;
        const std::string start = tensor.name.substr(0, tensor.name.size() - end.size());
        cases.push_back({static_cast<int>(tensor.shape.at(0)), file.tensor(start + ".x"), file.tensor(start + ".topk_ids"),
                         file.tensor(start + ".topk_weights"), tensor});
    }
    std::sort(cases.begin(), cases.end(), [](const Case& a, const Case& b) { return a.tokens < b.tokens; });
    return cases;
}

// The file must be for this rank of this layer; every wrong pairing would look like a wrong conversion.
void check_case_file(const marlin::TensorFile& io, const marlin::Shard& shard) {
    for (const char* key : {"tp", "ep", "rank", "layer"}) {
        const auto found = io.header().metadata.find(key);
        const std::string& expected = shard.header().metadata.at(key);
        if (found == io.header().metadata.end() || found->second != expected) {
            throw marlin::Error(io.file().path(), std::string("was not made for ") + key + " " + expected);
        }
    }
}

double relative_error(const std::vector<marlin::bf16>& out, marlin::View<float> expected) {
    double difference = 0, norm = 0;
    for (uint64_t i = 0; i < expected.size(); ++i) {
        const double e = expected[i], d = static_cast<float>(out[i]) - e;
        difference += d * d;
        norm += e * e;
    }
    if (norm == 0) return difference == 0 ? 0 : HUGE_VAL;  // no token has an expert here
    return std::sqrt(difference / norm);
}

template <class T, class U> void to_device(const DeviceArray<T>& to, const marlin::View<U>& from) {
    static_assert(sizeof(T) == sizeof(U));
    CUDA_CHECK(cudaMemcpy(to.get(), from.data(), from.size() * sizeof(U), cudaMemcpyHostToDevice));
}

// Median milliseconds of a captured call, and at the end the outputs are those of the last replay.
double time_graph(const std::function<void()>& call, const Stream& stream) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cudaEvent_t start = nullptr, stop = nullptr;
    CUDA_CHECK(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
    call();
    CUDA_CHECK(cudaStreamEndCapture(stream.get(), &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < kWarmUps + kReplays; ++i) {
        CUDA_CHECK(cudaEventRecord(start, stream.get()));
        CUDA_CHECK(cudaGraphLaunch(executable, stream.get()));
        CUDA_CHECK(cudaEventRecord(stop, stream.get()));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float milliseconds = 0;
        CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
        if (i >= kWarmUps) times.push_back(milliseconds);
    }
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
    return times[kReplays / 2];
}

marlin::Json run_case(const Case& one, const RoutedExperts& experts) {
    const auto hidden = static_cast<uint64_t>(experts.hidden());
    const uint64_t tokens = one.x.shape.at(0);
    if (one.x.shape != std::vector<uint64_t>{tokens, hidden} || one.expected.shape != one.x.shape || one.ids.shape != one.weights.shape) {
        throw std::invalid_argument(one.x.name + ": the shapes do not fit each other or the layer");
    }
    DeviceArray<__nv_bfloat16> x(tokens * hidden), out(tokens * hidden);
    DeviceArray<int32_t> ids(one.ids.view<int32_t>().size());
    DeviceArray<float> weights(one.weights.view<float>().size());
    to_device(x, one.x.view<marlin::bf16>());
    to_device(ids, one.ids.view<int32_t>());
    to_device(weights, one.weights.view<float>());
    const Stream stream;
    CUDA_CHECK(cudaDeviceSynchronize());
    const auto call = [&] { experts(x.get(), ids.get(), weights.get(), one.tokens, out.get(), stream.get()); };
    const auto fetch = [&] {
        stream.wait();
        std::vector<marlin::bf16> host(tokens * hidden);
        CUDA_CHECK(cudaMemcpy(host.data(), out.get(), host.size() * sizeof(marlin::bf16), cudaMemcpyDeviceToHost));
        return host;
    };
    call();
    const std::vector<marlin::bf16> eager = fetch();
    const double milliseconds = time_graph(call, stream);
    const std::vector<marlin::bf16> replayed = fetch();
    const bool repeatable = std::memcmp(eager.data(), replayed.data(), eager.size() * sizeof(marlin::bf16)) == 0;
    const double error = relative_error(eager, one.expected.view<float>());
    // A NaN fails the comparison too.
    return {{"tokens", one.tokens},   {"block_size", experts.block_size(one.tokens)}, {"relative_error", error},
            {"repeatable", repeatable}, {"ms", milliseconds},                         {"ok", error <= kTolerance && repeatable}};
}

int run(const marlin::Arguments& arguments) {
    const int number = arguments.number(1), layer = arguments.number(2);
    const marlin::Output out(arguments.positional(0));
    const marlin::Rank rank = out.open_rank(number);
    const marlin::Shard& shard = rank.layer(layer);
    if (!shard.experts()) throw marlin::Error(shard.file().path(), "has no routed experts");
    const marlin::TensorFile io(arguments.option("input", ""));
    check_case_file(io, shard);
    const std::vector<Case> cases = cases_of(io);
    if (cases.empty()) throw marlin::Error(io.file().path(), "has no cases");

    const marlin::GpuShards loaded({&shard}, {});
    const MarlinGemm gemm(arguments.option("kernel", ""), 0);
    const RoutedExperts experts(*shard.experts(), loaded, gemm, cases.back().tokens,
                                static_cast<int>(cases.back().ids.shape.at(1)));
    marlin::Json results = marlin::Json::array();
    bool ok = true;
    for (const Case& one : cases) {
        results.push_back(run_case(one, experts));
        ok = ok && results.back()["ok"].get<bool>();
    }
    const marlin::LoadTimes& times = loaded.times();
    const marlin::Json result = {{"rank", number},
                                 {"layer", layer},
                                 {"experts", shard.experts()->count},
                                 {"intermediate", shard.experts()->intermediate},
                                 {"load", {{"path", times.path}, {"bytes", times.bytes}, {"transfer_s", times.transfer}}},
                                 {"tolerance", kTolerance},
                                 {"cases", results},
                                 {"ok", ok}};
    std::printf("%s\n", result.dump().c_str());
    return ok ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const marlin::Arguments arguments(argc, argv, 3, {"kernel", "input"}, {});
        if (arguments.option("kernel", "").empty() || arguments.option("input", "").empty()) {
            throw marlin::UsageError("--kernel and --input are needed");
        }
        return run(arguments);
    } catch (const marlin::UsageError& error) {
        std::fprintf(stderr, "%s\nusage: native_moe OUT RANK LAYER --kernel MODULE.so --input IO.safetensors\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
