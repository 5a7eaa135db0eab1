// shard_info OUT RANK [--verify]: what a rank holds, and with --verify whether every byte is as it was written.
// Folders of other ranks need not be there. Exit code 0: fine; 1: something in OUT is wrong; 2: usage.
#include <cstdio>
#include <cstdlib>

#include "arguments.hpp"
#include "marlin_digest.hpp"

namespace {

constexpr char kUsage[] = "usage: shard_info OUT RANK [--verify]\n";

void print_rank(const marlin::Output& out, const marlin::Rank& rank) {
    const marlin::Manifest& manifest = out.manifest();
    std::printf("%s: rank %d of %d, ep %d, layout %s, source %s\n", out.folder().c_str(), rank.number(), manifest.tp,
                manifest.ep, manifest.layout.c_str(), marlin::printable(manifest.source_id).c_str());
    uint64_t total = 0;
    for (const marlin::Shard& shard : rank.shards()) {
        total += shard.file().size();
        std::printf("  %-44s %15llu bytes %4zu tensors %2zu fused", marlin::printable(shard.entry().path).c_str(),
                    static_cast<unsigned long long>(shard.file().size()), shard.tensors().size(),
                    shard.entry().fused.size());
        if (const auto& experts = shard.experts()) {
            std::printf("  experts %llu:%llu hidden %llu intermediate %llu", static_cast<unsigned long long>(experts->first),
                        static_cast<unsigned long long>(experts->first + experts->count),
                        static_cast<unsigned long long>(experts->hidden),
                        static_cast<unsigned long long>(experts->intermediate));
        }
        std::printf("\n");
    }
    std::printf("  %zu shards, %llu bytes\n", rank.shards().size(), static_cast<unsigned long long>(total));
}

void verify(const marlin::Output& out, const marlin::Rank& rank) {
    marlin::verify_manifest(out);
    marlin::verify_files(out, rank);
    const marlin::ExpertDigests experts(out);
    for (const marlin::Shard& shard : rank.shards()) marlin::verify_shard(shard, experts);
    for (const marlin::Shard& shard : out.open_common()) marlin::verify_shard(shard, experts);
    std::printf("  every digest of the manifest, this rank, common/ and the files that are for all ranks holds\n");
}

}  // namespace

int main(int argc, char** argv) {
    try {
        if (marlin::asks_for_help(argc, argv)) {
            std::printf("%s  what a rank of the converted folder OUT holds; --verify: is every byte as it was written?\n",
                        kUsage);
            return 0;
        }
        const marlin::Arguments arguments(argc, argv, 2, {}, {"verify"});
        const int number = arguments.number(1);
        const marlin::Output out(arguments.positional(0));
        const marlin::Rank rank = out.open_rank(number);
        print_rank(out, rank);
        if (arguments.flag("verify")) verify(out, rank);
        return 0;
    } catch (const marlin::UsageError& error) {
        std::fprintf(stderr, "%s\n%s", error.what(), kUsage);
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
