// Brings shards of a rank to the GPU: one allocation per file, so that a tensor's device address follows from its offset.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "marlin_shards.hpp"

namespace marlin {

struct CudaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class LoadPath {
    automatic,  // ring if the files are in the page cache or their file system has no direct reads, else direct
    mapped,     // pages of the mapping registered read-only: copied by the GPU straight from the page cache
    ring,       // read from the page cache into pinned buffers
    direct,     // the same past the page cache (O_DIRECT)
};

struct LoadOptions {
    LoadPath path = LoadPath::automatic;
    int device = 0;
    int threads = 0;        // 0: the path's default, as for chunk
    std::size_t chunk = 0;  // bytes registered or read at once, a multiple of 4096
    int buffers = 2;        // ring and direct: per thread
    bool populate = false;  // mapped: fill the page table before registering, instead of while
};

// Wall-clock seconds, and for the two that say so the sum over threads.
struct LoadTimes {
    std::string path;
    int threads = 0;
    std::size_t chunk = 0;
    uint64_t bytes = 0;
    double resident = 0;          // share of sampled pages that were in the page cache before
    double allocate = 0;          // device memory
    double pin = 0;               // ring and direct: the buffers
    double transfer = 0;          // from the first byte registered or read to the last one on the GPU
    double register_threads = 0;  // mapped: sum over threads
    double read_threads = 0;      // ring and direct: sum over threads
    double unregister = 0;        // mapped: afterwards, when the data can be used already
};

// Data sections of shards in device memory, until it is destroyed. The shards must outlive it.
class GpuShards {
  public:
    // Blocks until everything is there; the work runs on streams and threads of its own. Raises Error and CudaError.
    GpuShards(std::vector<const Shard*> shards, const LoadOptions& options);
    ~GpuShards();
    GpuShards(const GpuShards&) = delete;
    GpuShards& operator=(const GpuShards&) = delete;

    // Device address of a tensor, fused view, expert or other part of one of the shards.
    template <class T> const T* address(const Tensor& tensor) const {
        if (DtypeOf<T>::value != tensor.dtype) throw std::invalid_argument(tensor.name + " has another dtype");
        return reinterpret_cast<const T*>(address(tensor));
    }
    const std::byte* address(const Tensor& tensor) const;
    // Device address of the first tensor byte of a shard's file.
    const std::byte* data(std::size_t shard) const;
    const std::vector<const Shard*>& shards() const { return shards_; }
    const LoadTimes& times() const { return times_; }

  private:
    class Memory;
    std::vector<const Shard*> shards_;
    std::vector<std::unique_ptr<Memory>> memory_;
    LoadTimes times_;
};

// Share of pages in the page cache, from a sample of each file.
double resident_share(const std::vector<const Shard*>& shards);

// Drop the files from the page cache, as far as nothing else holds them. For measuring.
void evict(const std::vector<const Shard*>& shards);

}  // namespace marlin
