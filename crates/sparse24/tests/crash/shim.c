// Preloaded between the command and the kernel (LD_PRELOAD). Counts the operations that change
// files below a folder, or the messages to other ranks, and fails one or kills the process there.
//
//   SHIM_ROOT   the folder; operations on paths that start with it are counted from 0. The path of
//               a socket is socket:[NUMBER]
//   SHIM_PLAN   none                nothing happens
//               kill N              the process dies before operation N; a write is half done
//               stop N              the same, but the process is stopped
//               later N US          the process dies US microseconds after operation N
//               fail N ERRNO        operation N fails
//               every N ERRNO       operations N-1, 2N-1, ... fail
//               short N             the first write from operation N on writes half
//               full N              from operation N on, operations that need space fail: ENOSPC
//   SHIM_TRACE  a file to which each operation is appended as one line
//
// Operations that only read are not intercepted.

#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static atomic_long counter, traced;

enum verdict { GO, HALF, FAIL };

// The signal of a plan.
static int fatal(void) {
    const char *plan = getenv("SHIM_PLAN");
    return strncmp(plan, "kill", 4) == 0 ? SIGKILL : strncmp(plan, "stop", 4) == 0 ? SIGSTOP : 0;
}

static void die(void) {
    kill(getpid(), fatal());
    for (;;) pause();
}

static void die_later(long microseconds) {
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
    struct itimerspec when = {.it_value = {microseconds / 1000000, microseconds % 1000000 * 1000 + 1}};
    timer_t timer;
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) == 0) timer_settime(timer, 0, &when, NULL);
}

static void trace(const char *name, const char *path) {
    const char *file = getenv("SHIM_TRACE");
    if (!file) return;
    static int (*real_open)(const char *, int, ...);
    static ssize_t (*real_write)(int, const void *, size_t);
    if (!real_open) real_open = dlsym(RTLD_NEXT, "open64");
    if (!real_write) real_write = dlsym(RTLD_NEXT, "write");
    char line[8192];
    int length = snprintf(line, sizeof line, "%s %s\n", name, path);
    int fd = real_open(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) {
        if (real_write(fd, line, (size_t)length) < 0) _exit(99);
        close(fd);
    }
}

static enum verdict verdict(const char *name, const char *path, int needs_space) {
    const char *root = getenv("SHIM_ROOT"), *plan = getenv("SHIM_PLAN");
    if (!root || !plan || strncmp(path, root, strlen(root)) != 0) return GO;
    long now = atomic_fetch_add(&counter, 1), n = 0, argument = 0;
    char what[16] = "";
    sscanf(plan, "%15s %ld %ld", what, &n, &argument);
    int is_write = strcmp(name, "write") == 0 || strcmp(name, "send") == 0;
    // Other threads do nothing more.
    while (fatal() && now > n) pause();
    trace(name, path);
    atomic_fetch_add(&traced, 1);
    if (fatal() && now == n) {
        // Those before this one may be in other threads.
        while (atomic_load(&traced) <= n) usleep(100);
        if (is_write) return HALF;
        die();
    }
    if (strcmp(what, "later") == 0 && now == n) die_later(argument);
    if (strcmp(what, "short") == 0 && now >= n && is_write) {
        setenv("SHIM_PLAN", "none", 1);
        return HALF;
    }
    if (strcmp(what, "full") == 0 && now >= n && needs_space) {
        errno = ENOSPC;
        return FAIL;
    }
    if ((strcmp(what, "fail") == 0 && now == n) || (strcmp(what, "every") == 0 && now % n == n - 1)) {
        errno = (int)argument;
        return FAIL;
    }
    return GO;
}

// The path of an open file, or of a name relative to an open folder.
static const char *of_fd(int fd, char *buffer, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, size - 1);
    buffer[length < 0 ? 0 : length] = 0;
    return buffer;
}

static const char *at(int folder, const char *name, char *buffer, size_t size) {
    if (name[0] == '/' || folder == AT_FDCWD) return name;
    of_fd(folder, buffer, size);
    size_t length = strlen(buffer);
    snprintf(buffer + length, size - length, "/%s", name);
    return buffer;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = dlsym(RTLD_NEXT, name)

static int opens_to_write(int flags) { return (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC); }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, #name, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (opens_to_write(flags) && verdict("open", path, flags & O_CREAT) == FAIL) return -1; \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPEN_AT(name) \
    int name(int folder, const char *file, int flags, ...) { \
        REAL(int, #name, int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        char path[4096]; \
        if (opens_to_write(flags) && \
            verdict("open", at(folder, file, path, sizeof path), flags & O_CREAT) == FAIL) return -1; \
        return real(folder, file, flags, mode); \
    }
OPEN_AT(openat)
OPEN_AT(openat64)

ssize_t write(int fd, const void *bytes, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    char path[4096];
    switch (verdict("write", of_fd(fd, path, sizeof path), 1)) {
    case FAIL: return -1;
    case GO: return real(fd, bytes, size);
    case HALF: break;
    }
    ssize_t written = real(fd, bytes, (size + 1) / 2);
    if (fatal()) die();
    return written;
}

// How often each socket has sent. Beyond the two messages that greet, none is ahead of another by
// more than one: the threads that write to the other ranks do not wait for each other.
static atomic_long sent[1024];

static void keep_in_step(int fd) {
    const char *root = getenv("SHIM_ROOT");
    if (sent[fd] < 2 || !root || strncmp(root, "socket:", 7) != 0) return;
    for (int other = 0; other < 1024; other++) {
        // At most 10 s, because a socket may be closed.
        for (int i = 0; i < 100000 && sent[other] > 0 && sent[other] < sent[fd]; i++) usleep(100);
    }
}

// The trace has the first bytes after the header of a frame.
ssize_t send(int fd, const void *bytes, size_t size, int flags) {
    REAL(ssize_t, "send", int, const void *, size_t, int);
    const char *text = bytes;
    char path[4096];
    // Signs of life depend on the time.
    if (size == 5 && text[0] == 0) return real(fd, bytes, size, flags);
    size_t end = strlen(of_fd(fd, path, 4000));
    path[end++] = ' ';
    for (size_t i = 5; i < size && i < 25; i++) path[end++] = isprint((unsigned char)text[i]) ? text[i] : '.';
    path[end] = 0;
    keep_in_step(fd);
    enum verdict now = verdict("send", path, 0);
    sent[fd]++;
    if (now == GO) return real(fd, bytes, size, flags);
    real(fd, bytes, (size + 1) / 2, flags);
    die();
    return -1;
}

#define ON_FD(name) \
    int name(int fd) { \
        REAL(int, #name, int); \
        char path[4096]; \
        return verdict(#name, of_fd(fd, path, sizeof path), 1) == FAIL ? -1 : real(fd); \
    }
ON_FD(fsync)
ON_FD(fdatasync)

int ftruncate64(int fd, off64_t length) {
    REAL(int, "ftruncate64", int, off64_t);
    char path[4096];
    return verdict("ftruncate", of_fd(fd, path, sizeof path), 0) == FAIL ? -1 : real(fd, length);
}

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    return verdict("rename", to, 0) == FAIL ? -1 : real(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    char path[4096];
    return verdict("rename", at(to_folder, to, path, sizeof path), 0) == FAIL
        ? -1 : real(from_folder, from, to_folder, to);
}

int mkdirat(int folder, const char *name, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    char path[4096];
    return verdict("mkdir", at(folder, name, path, sizeof path), 1) == FAIL ? -1 : real(folder, name, mode);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    return verdict("mkdir", path, 1) == FAIL ? -1 : real(path, mode);
}

#define REMOVE(name) \
    int name(const char *path) { \
        REAL(int, #name, const char *); \
        return verdict(#name, path, 0) == FAIL ? -1 : real(path); \
    }
REMOVE(unlink)
REMOVE(rmdir)

int unlinkat(int folder, const char *name, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    char path[4096];
    return verdict("unlinkat", at(folder, name, path, sizeof path), 0) == FAIL ? -1 : real(folder, name, flags);
}
