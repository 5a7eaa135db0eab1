#include "gpu_loader.hpp"

#include <cuda_runtime.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace marlin {
namespace {

void check(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    cudaGetLastError();  // it is reported here, not by whatever is called next
    throw CudaError(std::string(what) + ": " + cudaGetErrorString(code));
}
#define MARLIN_CUDA_CHECK(call) check((call), #call)

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class Stream {
  public:
    Stream() { MARLIN_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream() {
        cudaStreamSynchronize(stream_);  // after a failure: nothing may copy from memory that goes away next
        cudaStreamDestroy(stream_);
    }
    void wait() { MARLIN_CUDA_CHECK(cudaStreamSynchronize(stream_)); }
    void copy(void* to, const void* from, std::size_t size) {
        MARLIN_CUDA_CHECK(cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, stream_));
    }
    cudaStream_t get() const { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

class Event {
  public:
    Event() { MARLIN_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event() { cudaEventDestroy(event_); }
    void record(const Stream& stream) { MARLIN_CUDA_CHECK(cudaEventRecord(event_, stream.get())); }
    void wait() { MARLIN_CUDA_CHECK(cudaEventSynchronize(event_)); }

  private:
    cudaEvent_t event_ = nullptr;
};

// Host pages that the GPU may copy from directly, as long as it lives.
class Registration {
  public:
    Registration(const void* at, std::size_t size, unsigned flags) : at_(const_cast<void*>(at)) {
        MARLIN_CUDA_CHECK(cudaHostRegister(at_, size, flags));
    }
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;
    ~Registration() { cudaHostUnregister(at_); }

  private:
    void* at_;
};

// Anonymous memory in huge pages, registered: many times faster to get than cudaHostAlloc, and by each thread for itself.
class PinnedBuffer {
  public:
    explicit PinnedBuffer(std::size_t size) : pages_(size), registration_(pages_.at, size, cudaHostRegisterDefault) {}
    void* data() const { return pages_.at; }

  private:
    struct Pages {
        explicit Pages(std::size_t bytes) : size(bytes) {
            at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (at == MAP_FAILED) throw std::bad_alloc();
            ::madvise(at, size, MADV_HUGEPAGE);
        }
        Pages(const Pages&) = delete;
        Pages& operator=(const Pages&) = delete;
        ~Pages() { ::munmap(at, size); }
        void* at;
        std::size_t size;
    };
    Pages pages_;
    Registration registration_;
};

struct Chunk {
    std::size_t shard;
    uint64_t offset;  // in the file
    std::size_t size;
};

std::vector<Chunk> cut(const std::vector<const Shard*>& shards, std::size_t size) {
    std::vector<Chunk> chunks;
    for (std::size_t i = 0; i < shards.size(); ++i) {
        const uint64_t end = shards[i]->file().size();
        for (uint64_t at = shards[i]->data_start(); at < end; at += size) {
            chunks.push_back({i, at, static_cast<std::size_t>(std::min<uint64_t>(size, end - at))});
        }
    }
    return chunks;
}

// Hands out numbers from 0 to count - 1 to threads, until one of them fails.
class Queue {
  public:
    explicit Queue(std::size_t count) : count_(count) {}
    bool next(std::size_t& index) {
        index = next_++;
        return index < count_;
    }
    void stop() { next_ = count_; }

  private:
    const std::size_t count_;
    std::atomic<std::size_t> next_{0};
};

// work(thread) on each of `count` threads; the first exception is raised here, after all of them have ended.
void on_threads(int count, int device, Queue& queue, const std::function<void(int)>& work) {
    std::exception_ptr first;
    std::mutex mutex;
    const auto guarded = [&](int number) {
        try {
            MARLIN_CUDA_CHECK(cudaSetDevice(device));
            work(number);
        } catch (...) {
            queue.stop();
            const std::lock_guard<std::mutex> lock(mutex);
            if (!first) first = std::current_exception();
        }
    };
    std::vector<std::thread> threads;
    try {
        for (int i = 0; i < count; ++i) threads.emplace_back(guarded, i);
    } catch (...) {  // no more threads to be had
        queue.stop();
        for (std::thread& thread : threads) thread.join();
        throw;
    }
    for (std::thread& thread : threads) thread.join();
    if (first) std::rethrow_exception(first);
}

class ThreadSeconds {
  public:
    void add(double seconds) {
        const std::lock_guard<std::mutex> lock(mutex_);
        seconds_ += seconds;
    }
    double get() const { return seconds_; }

  private:
    std::mutex mutex_;
    double seconds_ = 0;
};

using Destination = std::function<void*(const Chunk&)>;

void load_mapped(const std::vector<const Shard*>& shards, const LoadOptions& options, const Destination& to, LoadTimes& times) {
    const std::vector<Chunk> chunks = cut(shards, options.chunk);
    std::vector<std::unique_ptr<Registration>> registrations(chunks.size());
    ThreadSeconds registering;
    const double start = now();
    {
        Queue queue(chunks.size());
        // While a thread's copy runs it registers its next chunk, as do the others: the link is kept busy from the
        // second chunk on, if they together register faster than it copies.
        on_threads(options.threads, options.device, queue, [&](int) {
            Stream stream;
            double seconds = 0;
            for (std::size_t i; queue.next(i);) {
                const Chunk& chunk = chunks[i];
                const std::byte* from = shards[chunk.shard]->data() + chunk.offset;
                const double before = now();
#ifdef MADV_POPULATE_READ
                if (options.populate) ::madvise(const_cast<std::byte*>(from), chunk.size, MADV_POPULATE_READ);
#endif
                registrations[i] = std::make_unique<Registration>(from, chunk.size, cudaHostRegisterReadOnly);
                seconds += now() - before;
                stream.copy(to(chunk), from, chunk.size);
            }
            registering.add(seconds);
            stream.wait();
        });
    }
    times.transfer = now() - start;
    times.register_threads = registering.get();
    Queue queue(chunks.size());
    const double loaded = now();
    on_threads(options.threads, options.device, queue, [&](int) {
        for (std::size_t i; queue.next(i);) registrations[i].reset();
    });
    times.unregister = now() - loaded;
}

struct Slot {
    explicit Slot(std::size_t size) : buffer(size) {}
    PinnedBuffer buffer;
    Event copied;
    bool used = false;
};

struct Reader {  // one per thread; the stream goes first when it is destroyed, and waits
    std::vector<std::unique_ptr<Slot>> slots;
    Stream stream;
};

void load_through_buffers(const std::vector<const Shard*>& shards, const LoadOptions& options, const Destination& to, LoadTimes& times) {
    const std::vector<Chunk> chunks = cut(shards, options.chunk);
    std::vector<File> files;
    for (const Shard* shard : shards) {
        files.emplace_back(shard->file().path(), options.path == LoadPath::direct ? O_DIRECT : 0);
        if (files.back().size() != shard->file().size()) throw Error(files.back().path(), "has changed its size");
    }
    const auto count = static_cast<std::size_t>(options.threads);
    std::vector<std::unique_ptr<Reader>> readers(count);
    ThreadSeconds reading;
    double start = now();
    {
        Queue queue(count);
        on_threads(options.threads, options.device, queue, [&](int) {
            for (std::size_t i; queue.next(i);) {
                auto reader = std::make_unique<Reader>();
                for (int j = 0; j < options.buffers; ++j) reader->slots.push_back(std::make_unique<Slot>(options.chunk));
                readers[i] = std::move(reader);
            }
        });
    }
    times.pin = now() - start;
    start = now();
    Queue queue(chunks.size());
    on_threads(options.threads, options.device, queue, [&](int number) {
        Reader& reader = *readers[static_cast<std::size_t>(number)];
        double seconds = 0;
        std::size_t turn = 0;
        for (std::size_t i; queue.next(i); ++turn) {
            const Chunk& chunk = chunks[i];
            Slot& slot = *reader.slots[turn % reader.slots.size()];
            if (slot.used) slot.copied.wait();  // its bytes may still be on their way
            const double before = now();
            files[chunk.shard].read(chunk.offset, slot.buffer.data(), chunk.size);
            seconds += now() - before;
            reader.stream.copy(to(chunk), slot.buffer.data(), chunk.size);
            slot.copied.record(reader.stream);
            slot.used = true;
        }
        reading.add(seconds);
        reader.stream.wait();
    });
    times.transfer = now() - start;
    times.read_threads = reading.get();
}

bool can_register_read_only(int device) {
    int supported = 0;
    MARLIN_CUDA_CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrHostRegisterReadOnlySupported, device));
    return supported != 0;
}

bool refuses_direct_reads(const std::string& path) {  // some file systems do
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (descriptor >= 0) ::close(descriptor);
    return descriptor < 0 && errno == EINVAL;
}

LoadPath choose(const LoadOptions& options, const std::vector<const Shard*>& shards, double resident) {
    if (options.path != LoadPath::automatic) return options.path;
    const bool direct = resident < 0.9 && !shards.empty() && !refuses_direct_reads(shards.front()->file().path());
    return direct ? LoadPath::direct : LoadPath::ring;
}

LoadOptions with_defaults(LoadOptions options) {
    const bool mapped = options.path == LoadPath::mapped, direct = options.path == LoadPath::direct;
    // A disk is read fastest by few threads in large pieces; the page cache by many, into buffers that stay in the processor's cache.
    if (options.threads == 0) options.threads = mapped || direct ? 4 : 16;
    if (options.chunk == 0) options.chunk = (mapped ? 256u : direct ? 32u : 2u) << 20;
    if (options.threads < 1 || options.buffers < 1 || options.chunk % kPage != 0) {
        throw std::invalid_argument("threads and buffers must be at least 1, a chunk a multiple of 4096 bytes");
    }
    return options;
}

const char* name_of(LoadPath path) {
    return path == LoadPath::mapped ? "mmap" : path == LoadPath::ring ? "ring" : "direct";
}

}  // namespace

// Device memory for the data section of one file.
class GpuShards::Memory {
  public:
    explicit Memory(std::size_t size) { MARLIN_CUDA_CHECK(cudaMalloc(&at_, size)); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { cudaFree(at_); }
    std::byte* data() const { return static_cast<std::byte*>(at_); }

  private:
    void* at_ = nullptr;
};

GpuShards::GpuShards(std::vector<const Shard*> shards, const LoadOptions& requested) : shards_(std::move(shards)) {
    MARLIN_CUDA_CHECK(cudaSetDevice(requested.device));
    times_.resident = resident_share(shards_);
    const double start = now();
    for (const Shard* shard : shards_) {
        memory_.push_back(std::make_unique<Memory>(shard->data_size()));
        times_.bytes += shard->data_size();
    }
    times_.allocate = now() - start;
    const Destination to = [this](const Chunk& chunk) -> void* {
        return memory_[chunk.shard]->data() + (chunk.offset - shards_[chunk.shard]->data_start());
    };
    LoadOptions options = requested;
    options.path = choose(requested, shards_, times_.resident);
    options = with_defaults(options);
    times_.path = name_of(options.path);
    times_.threads = options.threads;
    times_.chunk = options.chunk;
    if (options.path == LoadPath::mapped) {
        if (!can_register_read_only(options.device)) throw CudaError("the driver can't register read-only memory");
        load_mapped(shards_, options, to, times_);
    } else {
        load_through_buffers(shards_, options, to, times_);
    }
}

GpuShards::~GpuShards() = default;

const std::byte* GpuShards::data(std::size_t shard) const { return memory_.at(shard)->data(); }

const std::byte* GpuShards::address(const Tensor& tensor) const {
    for (std::size_t i = 0; i < shards_.size(); ++i) {
        const std::byte* begin = shards_[i]->data() + shards_[i]->data_start();
        const std::byte* end = begin + shards_[i]->data_size();
        // std::less orders pointers into different mappings, which < need not.
        if (!std::less<>()(tensor.data, begin) && std::less<>()(tensor.data, end)) return data(i) + (tensor.data - begin);
    }
    throw std::invalid_argument(tensor.name + " is of none of the shards that were loaded");
}

double resident_share(const std::vector<const Shard*>& shards) {
    constexpr uint64_t kSamples = 64;
    uint64_t seen = 0, resident = 0;
    for (const Shard* shard : shards) {
        const uint64_t pages = shard->file().size() / kPage;
        for (uint64_t i = 0; i < std::min(kSamples, pages); ++i) {
            unsigned char state = 0;
            auto* page = const_cast<std::byte*>(shard->data()) + i * pages / std::min(kSamples, pages) * kPage;
            if (::mincore(page, kPage, &state) == 0) resident += state & 1;
            ++seen;
        }
    }
    return seen == 0 ? 0 : static_cast<double>(resident) / static_cast<double>(seen);
}

void evict(const std::vector<const Shard*>& shards) {
    for (const Shard* shard : shards) {
        ::fdatasync(shard->file().fd());  // dirty pages stay
        ::posix_fadvise(shard->file().fd(), 0, 0, POSIX_FADV_DONTNEED);
    }
}

}  // namespace marlin
