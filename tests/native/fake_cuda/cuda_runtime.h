// A CUDA runtime that is only memory: as much of it as gpu_loader.cpp calls, to test the loader without a GPU.
//
// Copies are late on purpose: a stream does nothing before something waits for it, so a buffer that is reused or
// unregistered too early gives wrong bytes or an error here, every time. FAKE_CUDA_READ_ONLY=0 makes a device that
// cannot register read-only memory, FAKE_CUDA_REGISTER_LIMIT=N one whose N+1st registration at a time fails.
#pragma once

#include <cstddef>

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaDeviceAttr { cudaDevAttrHostRegisterReadOnlySupported = 113 };
constexpr unsigned cudaHostRegisterDefault = 0, cudaHostRegisterReadOnly = 8;
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;
struct FakeStream;
struct FakeEvent;
using cudaStream_t = FakeStream*;
using cudaEvent_t = FakeEvent*;

const char* cudaGetErrorString(cudaError_t code);
cudaError_t cudaGetLastError();
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMalloc(void** at, std::size_t size);
cudaError_t cudaFree(void* at);
cudaError_t cudaHostRegister(void* at, std::size_t size, unsigned flags);
cudaError_t cudaHostUnregister(void* at);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
