// A CUDA driver for tests, with GPUs that compute nothing. The environment sets its faults:
// FAKE_INIT, FAKE_OPEN: the error codes of cuInit and of opening a GPU
// FAKE_SIGNAL: the signal by which cuInit ends the process
// FAKE_RELEASE, FAKE_GPUS, FAKE_CAPABILITY (90 is 9.0), FAKE_MIB: the driver and its GPUs
// FAKE_OTHERS_MIB: memory that other processes hold
// FAKE_COPIES: the number of copies that run out of memory before one fails for good
#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum { OUT_OF_MEMORY = 2, LAUNCH_FAILED = 719, MAJOR = 75, MINOR = 76 };

static long number(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text ? atol(text) : otherwise;
}

static size_t held;
static size_t total(void) { return (size_t)number("FAKE_MIB", 1024) << 20; }
static size_t left(void) { return total() - ((size_t)number("FAKE_OTHERS_MIB", 0) << 20) - held; }

int cuDriverGetVersion(int* version) { return *version = number("FAKE_RELEASE", 13000), 0; }
int cuInit(unsigned flags) {
    return (void)flags, raise(number("FAKE_SIGNAL", 0)), number("FAKE_INIT", 0);
}
int cuDeviceGetCount(int* count) { return *count = number("FAKE_GPUS", 1), 0; }
int cuDeviceGet(int* gpu, int ordinal) { return *gpu = ordinal, 0; }
int cuDeviceGetName(char* name, int length, int gpu) {
    return (void)gpu, strncpy(name, "NVIDIA F1", length), 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int gpu) { return (void)gpu, *bytes = total(), 0; }
int cuDeviceGetAttribute(int* value, int which, int gpu) {
    long capability = number("FAKE_CAPABILITY", 90);
    *value = which == MAJOR ? capability / 10 : which == MINOR ? capability % 10 : 1;
    return (void)gpu, 0;
}
int cuDevicePrimaryCtxRetain(void** context, int gpu) {
    return (void)gpu, *context = &held, number("FAKE_OPEN", 0);
}
int cuDevicePrimaryCtxRelease_v2(int gpu) { return (void)gpu, 0; }
int cuCtxSetCurrent(void* context) { return (void)context, 0; }
int cuCtxGetCurrent(void** context) { return *context = &held, 0; }
int cuCtxGetDevice(int* gpu) { return *gpu = 0, 0; }
int cuStreamCreate(void** stream, unsigned flags) { return (void)flags, *stream = &held, 0; }
int cuStreamSynchronize(void* stream) { return (void)stream, 0; }
int cuStreamDestroy_v2(void* stream) { return (void)stream, 0; }
int cuMemGetInfo_v2(size_t* available, size_t* of) { return *of = total(), *available = left(), 0; }
int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
    if (bytes > left()) return OUT_OF_MEMORY;
    return held += bytes, *address = 1 << 20, 0;
}
// No memory can be pinned.
int cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
    return (void)address, (void)bytes, (void)flags, OUT_OF_MEMORY;
}
int cuMemFree_v2(unsigned long long address) { return (void)address, 0; }
int cuMemsetD8Async(unsigned long long address, unsigned char byte, size_t bytes, void* stream) {
    return (void)address, (void)byte, (void)bytes, (void)stream, 0;
}
int cuMemcpy2DAsync_v2(const void* copy, void* stream) {
    static long copies;
    (void)copy, (void)stream;
    return copies++ < number("FAKE_COPIES", 0) ? OUT_OF_MEMORY : LAUNCH_FAILED;
}
