// load_rank OUT RANK: brings a rank to the GPU and says how long each part took.
// Exit code 0: fine; 1: something in OUT is wrong, or the GPU failed; 2: usage.
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>

#include "arguments.hpp"
#include "gpu_loader.hpp"
#include "marlin_digest.hpp"

namespace {

constexpr const char* kUsage =
    "usage: load_rank OUT RANK [--path auto|mmap|ring|direct] [--threads N] [--chunk MB|KBk] [--buffers N] [--repeat R]\n"
    "                 [--device N] [--populate] [--evict] [--check] [--json]\n";

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// "256": MiB; "64k": KiB.
std::size_t parse_chunk(std::string text) {
    const bool small = !text.empty() && text.back() == 'k';
    if (small) text.pop_back();
    return static_cast<std::size_t>(marlin::parse_number(text)) << (small ? 10 : 20);
}

marlin::LoadOptions options_of(const marlin::Arguments& arguments) {
    marlin::LoadOptions options;
    const std::string path = arguments.option("path", "auto");
    if (path == "mmap") {
        options.path = marlin::LoadPath::mapped;
    } else if (path == "ring") {
        options.path = marlin::LoadPath::ring;
    } else if (path == "direct") {
        options.path = marlin::LoadPath::direct;
    } else if (path != "auto") {
        throw marlin::UsageError("--path is auto, mmap, ring or direct");
    }
    options.threads = arguments.option("threads", 0);
    options.chunk = parse_chunk(arguments.option("chunk", "0"));
    options.buffers = arguments.option("buffers", 2);
    options.device = arguments.option("device", 0);
    options.populate = arguments.flag("populate");
    const bool sensible = options.threads <= 256 && options.buffers >= 1 && options.buffers <= 64 &&
                          options.chunk % marlin::kPage == 0 && options.chunk <= std::size_t{4} << 30;
    if (!sensible) throw marlin::UsageError("a number is out of range, or the chunk is not whole pages");
    return options;
}

// Copies every byte back and compares with the manifest's digests.
void check_copies(const marlin::Output& out, const marlin::GpuShards& loaded) {
    const marlin::ExpertDigests experts(out);
    for (std::size_t i = 0; i < loaded.shards().size(); ++i) {
        std::vector<std::byte> back(loaded.shards()[i]->data_size());
        const cudaError_t code = cudaMemcpy(back.data(), loaded.data(i), back.size(), cudaMemcpyDeviceToHost);
        if (code != cudaSuccess) throw marlin::CudaError(std::string("copying back: ") + cudaGetErrorString(code));
        marlin::verify_shard(*loaded.shards()[i], experts, back.data());
    }
}

marlin::Json run(const marlin::Arguments& arguments, int number, const marlin::LoadOptions& options) {
    double start = now();
    const marlin::Output out(arguments.positional(0));
    const marlin::Rank rank = out.open_rank(number);
    const double open = now() - start;
    std::vector<const marlin::Shard*> shards;
    for (const marlin::Shard& shard : rank.shards()) shards.push_back(&shard);
    if (arguments.flag("evict")) marlin::evict(shards);

    start = now();
    const marlin::GpuShards loaded(shards, options);
    const double load = now() - start;
    if (arguments.flag("check")) check_copies(out, loaded);
    const marlin::LoadTimes& times = loaded.times();
    const double gigabytes = static_cast<double>(times.bytes) / 1e9;
    return {
        {"path", times.path},
        {"threads", times.threads},
        {"chunk_bytes", times.chunk},
        {"bytes", times.bytes},
        {"shards", shards.size()},
        {"resident_before", times.resident},
        {"open_s", open},
        {"allocate_s", times.allocate},
        {"pin_s", times.pin},
        {"transfer_s", times.transfer},
        {"register_thread_s", times.register_threads},
        {"read_thread_s", times.read_threads},
        {"unregister_s", times.unregister},
        {"total_s", open + load - times.unregister},
        {"gb_per_s", gigabytes / times.transfer},
        {"gb_per_s_total", gigabytes / (open + load - times.unregister)},
        {"checked", arguments.flag("check")},
    };
}

void print(const marlin::Json& result) {
    std::printf("%-6s %8.3f GB in %7.3f s: %6.2f GB/s", result["path"].get<std::string>().c_str(),
                result["bytes"].get<double>() / 1e9, result["transfer_s"].get<double>(), result["gb_per_s"].get<double>());
    for (const char* part : {"open_s", "allocate_s", "pin_s", "register_thread_s", "read_thread_s", "unregister_s"}) {
        std::printf("  %s %.3f", part, result[part].get<double>());
    }
    std::printf("%s\n", result["checked"].get<bool>() ? "  every byte checked" : "");
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const marlin::Arguments arguments(argc, argv, 2, {"path", "threads", "chunk", "buffers", "repeat", "device"},
                                          {"populate", "evict", "check", "json"});
        const marlin::LoadOptions options = options_of(arguments);
        const int rank = arguments.number(1), repeat = arguments.option("repeat", 1);
        // The first use of the GPU in a process takes a while that belongs to no load.
        const cudaError_t code = cudaSetDevice(options.device) == cudaSuccess ? cudaFree(nullptr) : cudaGetLastError();
        if (code != cudaSuccess) throw marlin::CudaError(std::string("no GPU: ") + cudaGetErrorString(code));
        marlin::Json runs = marlin::Json::array();
        for (int i = 0; i < repeat; ++i) {
            runs.push_back(run(arguments, rank, options));
            if (!arguments.flag("json")) print(runs.back());
        }
        if (arguments.flag("json")) {
            const marlin::Json result = {{"out", arguments.positional(0)}, {"rank", rank}, {"runs", runs}};
            std::printf("%s\n", result.dump().c_str());
        }
        return 0;
    } catch (const marlin::UsageError& error) {
        std::fprintf(stderr, "%s\n%s", error.what(), kUsage);
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
