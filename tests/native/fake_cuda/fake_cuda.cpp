#include "cuda_runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>

namespace {

constexpr cudaError_t kInvalid = 1, kOutOfMemory = 2, kNotSupported = 801;

struct Copy {
    char* to;
    const char* from;
    std::size_t size;
};

// What a real run would only show as wrong data or a fault, at best.
[[noreturn]] void misuse(const char* what) {
    std::fprintf(stderr, "fake CUDA: %s\n", what);
    std::abort();
}

std::mutex mutex;
std::map<const char*, std::size_t> registered, allocated;

bool inside(const std::map<const char*, std::size_t>& ranges, const char* at, std::size_t size) {
    auto after = ranges.upper_bound(at);
    if (after == ranges.begin()) return false;
    --after;
    return at + size <= after->first + after->second;
}

std::size_t setting(const char* name, std::size_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace

struct FakeStream {
    std::deque<Copy> waiting;
    std::size_t issued = 0, done = 0;
    void run_until(std::size_t count) {
        for (; done < count; ++done) {
            const Copy copy = waiting.front();
            waiting.pop_front();
            if (!inside(registered, copy.from, copy.size)) misuse("memory was unregistered before its copy ran");
            std::memcpy(copy.to, copy.from, copy.size);
        }
    }
};

struct FakeEvent {
    FakeStream* stream = nullptr;
    std::size_t at = 0;
};

const char* cudaGetErrorString(cudaError_t code) {
    return code == kOutOfMemory ? "fake out of memory" : code == kNotSupported ? "fake not supported" : "fake invalid value";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : kInvalid; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
    *value = setting("FAKE_CUDA_READ_ONLY", 1) != 0;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** at, std::size_t size) {
    const std::lock_guard<std::mutex> lock(mutex);
    *at = ::operator new(size, std::align_val_t(256));
    allocated[static_cast<char*>(*at)] = size;
    return cudaSuccess;
}

cudaError_t cudaFree(void* at) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (at == nullptr) return cudaSuccess;
    if (allocated.erase(static_cast<char*>(at)) == 0) misuse("freed what was not allocated");
    ::operator delete(at, std::align_val_t(256));
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void* at, std::size_t size, unsigned flags) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (registered.size() >= setting("FAKE_CUDA_REGISTER_LIMIT", 1u << 30)) return kOutOfMemory;
    if (flags == cudaHostRegisterReadOnly && setting("FAKE_CUDA_READ_ONLY", 1) == 0) return kNotSupported;
    if (!registered.emplace(static_cast<char*>(at), size).second) misuse("registered twice");
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* at) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (registered.erase(static_cast<char*>(at)) == 0) misuse("unregistered what was not registered");
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind) {
    std::memcpy(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!inside(registered, static_cast<const char*>(from), size)) misuse("a copy from memory that is not registered");
    if (!inside(allocated, static_cast<char*>(to), size)) misuse("a copy to memory that is not the device's");
    stream->waiting.push_back({static_cast<char*>(to), static_cast<const char*>(from), size});
    ++stream->issued;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = new FakeStream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    stream->run_until(stream->issued);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new FakeEvent;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    *event = {stream, stream->issued};
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (event->stream != nullptr) event->stream->run_until(event->at);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
