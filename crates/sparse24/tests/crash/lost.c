// A Vulkan driver for tests that is Mesa's lavapipe until it loses its device or lacks memory.
//
//   LOST_TRACE  a file to which each submission and each wait is appended as one letter
//   LOST_AT     from this one on, counted from 0, they report VK_ERROR_DEVICE_LOST and do nothing
//   LOST_ABOVE  allocations of more bytes report VK_ERROR_OUT_OF_DEVICE_MEMORY

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OUT_OF_DEVICE_MEMORY = -2, DEVICE_LOST = -4 };

typedef void function(void);
typedef function* find(void* of, const char* name);

static atomic_long counter;
static atomic_int is_lost;

static int loses(const char* kind) {
    const char *at = getenv("LOST_AT"), *trace = getenv("LOST_TRACE");
    if (at && atomic_fetch_add(&counter, 1) >= atol(at)) is_lost = 1;
    FILE* file = trace ? fopen(trace, "a") : NULL;
    if (file) fputs(kind, file), fclose(file);
    return is_lost;
}

static int (*real_submit)(void*, uint32_t, const void*, void*);
static int submit(void* queue, uint32_t count, const void* what, void* fence) {
    return loses("s") ? DEVICE_LOST : real_submit(queue, count, what, fence);
}

static int (*real_wait)(void*, const void*, uint64_t);
static int wait(void* device, const void* what, uint64_t timeout) {
    return loses("w") ? DEVICE_LOST : real_wait(device, what, timeout);
}

static int (*real_value)(void*, void*, uint64_t*);
static int value(void* device, void* semaphore, uint64_t* found) {
    return is_lost ? DEVICE_LOST : real_value(device, semaphore, found);
}

// VkMemoryAllocateInfo, as far as it is read.
struct wanted { int type; const void* next; uint64_t bytes; };

static int (*real_allocate)(void*, const struct wanted*, const void*, void*);
static int allocate(void* device, const struct wanted* what, const void* with, void* found) {
    const char* above = getenv("LOST_ABOVE");
    if (above && what->bytes > strtoull(above, NULL, 10)) return OUT_OF_DEVICE_MEMORY;
    return real_allocate(device, what, with, found);
}

static void* driver(const char* name) {
    static void* library;
    if (!library) library = dlopen("libvulkan_lvp.so", RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, name) : NULL;
}

static find* of_device;
static function* in_device(void* device, const char* name) {
    function* real = of_device(device, name);
    if (!real) return NULL;
    if (strcmp(name, "vkQueueSubmit") == 0) {
        return real_submit = (void*)real, (function*)submit;
    }
    if (strncmp(name, "vkWaitSemaphores", 16) == 0) {
        return real_wait = (void*)real, (function*)wait;
    }
    if (strncmp(name, "vkGetSemaphoreCounterValue", 26) == 0) {
        return real_value = (void*)real, (function*)value;
    }
    if (strcmp(name, "vkAllocateMemory") == 0) {
        return real_allocate = (void*)real, (function*)allocate;
    }
    return real;
}

function* vk_icdGetInstanceProcAddr(void* instance, const char* name) {
    find* real = (find*)driver(__func__);
    function* found = real ? real(instance, name) : NULL;
    if (!found || strcmp(name, "vkGetDeviceProcAddr") != 0) return found;
    return of_device = (find*)found, (function*)in_device;
}

function* vk_icdGetPhysicalDeviceProcAddr(void* instance, const char* name) {
    find* real = (find*)driver(__func__);
    return real ? real(instance, name) : NULL;
}

int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t* version) {
    int (*real)(uint32_t*) = driver(__func__);
    return real ? real(version) : -9;
}
