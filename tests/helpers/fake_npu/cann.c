/* CANN's C interface (ACL) over the memory of the host, for tests of what runs on an NPU.
 *
 * Device memory is host memory, taken from one budget (FAKE_NPU_BYTES for each of FAKE_NPUS devices) that all processes
 * with the same FAKE_NPU_LEDGER share, as ranks and servers do; what a dead process had is free. Work is done when it is
 * asked for, so streams and events have nothing to wait for. Physical pages are memory files and virtual
 * addresses are mappings of them, so that memory that a sleeping server gives back is really gone. Functions that are
 * not here are made by build.py: they return 0, which is ACL's success. Signatures: CANN's documentation of ACL.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int Error;
enum { OK = 0, OUT_OF_MEMORY = 207001, PAGE = 2 << 20, MAX_DEVICES = 16, MAX_PROCESSES = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int device;

static size_t setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}
static size_t capacity(void) { return setting("FAKE_NPU_BYTES", (size_t)64 << 30); }

/* What each process has of each device, in memory that they share. */
static struct share { pid_t process; size_t used[MAX_DEVICES]; } *shares, *own;
static int ledger;

static int is_free(const struct share *one) { return !one->process || kill(one->process, 0); }
static void open_ledger(void) {
    const char *path = getenv("FAKE_NPU_LEDGER");
    ledger = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : memfd_create("ledger", MFD_CLOEXEC);
    flock(ledger, LOCK_EX);
    if (ledger < 0 || ftruncate(ledger, MAX_PROCESSES * sizeof *shares)) abort();
    shares = own = mmap(NULL, MAX_PROCESSES * sizeof *shares, PROT_READ | PROT_WRITE, MAP_SHARED, ledger, 0);
    while (!is_free(own)) own++;
    *own = (struct share){getpid()};
    flock(ledger, LOCK_UN);
}
static int physical(int of) { /* CANN counts the devices that a process sees from 0 */
    const char *seen = getenv("ASCEND_RT_VISIBLE_DEVICES");
    for (int number = 0; seen && number < of; number++) seen = strchr(seen, ',') ? strchr(seen, ',') + 1 : NULL;
    return seen && *seen ? atoi(seen) : of;
}
static size_t used(int of) {
    size_t sum = 0;
    for (int number = 0; number < MAX_PROCESSES; number++)
        if (!is_free(&shares[number])) sum += shares[number].used[physical(of)];
    return sum;
}
static void begin(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_ledger);
    pthread_mutex_lock(&lock);
    flock(ledger, LOCK_EX);
}
static void end(void) {
    flock(ledger, LOCK_UN);
    pthread_mutex_unlock(&lock);
}
static Error take(int of, size_t size) {
    begin();
    Error error = used(of) + size > capacity() ? OUT_OF_MEMORY : OK;
    if (!error) own->used[physical(of)] += size;
    end();
    return error;
}
static void give_back(int of, size_t size) {
    begin();
    own->used[physical(of)] -= size;
    end();
}

/* Devices and contexts. */
Error aclrtSetDevice(int32_t number) { device = number; return OK; }
Error aclrtGetDevice(int32_t *number) { *number = device; return OK; }
Error aclrtGetDeviceCount(uint32_t *count) { *count = setting("FAKE_NPUS", 1); return OK; }
static int context;
Error aclrtGetCurrentContext(void **found) { *found = &context; return OK; }
Error aclrtCreateContext(void **made, int32_t number) { *made = &context; return OK; }
const char *aclrtGetSocName(void) { const char *name = getenv("FAKE_NPU_SOC"); return name ? name : "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return ""; }
Error aclrtGetDeviceInfo(uint32_t number, int attribute, int64_t *value) { *value = 24; return OK; }
Error aclrtGetDeviceUtilizationRate(int32_t number, void *rates) { memset(rates, 0, 24); return OK; }
Error aclrtDeviceCanAccessPeer(int32_t *can, int32_t from, int32_t to) { *can = 1; return OK; }
Error aclrtDeviceGetBareTgid(int32_t *process) { *process = getpid(); return OK; }
Error aclrtGetPhyDevIdByLogicDevId(int32_t logical, int32_t *physical) { *physical = logical; return OK; }
Error aclrtGetDevicesTopo(uint32_t one, uint32_t other, uint64_t *value) { *value = 0; return OK; }
Error aclrtGetRunMode(int *mode) { *mode = 1; return OK; }
Error aclrtGetResInCurrentThread(int kind, uint32_t *value) { *value = 24; return OK; }
int aclGetDeviceCapability(uint32_t number, int kind, int *value) { *value = 0; return OK; }
Error aclGetCannAttribute(int attribute, int32_t *value) { *value = 0; return OK; }
Error aclrtGetOpExecuteTimeOut(uint32_t *milliseconds) { *milliseconds = 1; return OK; }
Error aclrtCtxGetSysParamOpt(int option, int64_t *value) { *value = 0; return OK; }
Error aclrtGetSysParamOpt(int option, int64_t *value) { *value = 0; return OK; }

/* Versions. */
Error aclsysGetCANNVersion(int package, char *version) { memset(version, 0, 128); strcpy(version, "9.1.0"); return OK; }
Error aclsysGetVersionStr(char *package, char *version) { strcpy(version, "9.1.0"); return OK; }
Error aclsysGetVersionNum(char *package, int32_t *number) { *number = 90100000; return OK; }
Error aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) { *major = 9; *minor = 1; *patch = 0; return OK; }

/* Memory in blocks. A header before each tells its size and device. */
struct header { size_t size; int device; };
Error aclrtMalloc(void **memory, size_t size, int policy) {
    Error error = take(device, size);
    if (error) return error;
    char *block = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) { give_back(device, size); return OUT_OF_MEMORY; }
    *(struct header *)block = (struct header){size, device};
    *memory = block + 4096;
    return OK;
}
Error aclrtMallocAlign32(void **memory, size_t size, int policy) { return aclrtMalloc(memory, size, policy); }
Error aclrtFree(void *memory) {
    struct header *header = (struct header *)((char *)memory - 4096);
    give_back(header->device, header->size);
    munmap(header, header->size + PAGE);
    return OK;
}
Error aclrtMallocHost(void **memory, size_t size) {
    *memory = aligned_alloc(4096, (size + 4095) & ~(size_t)4095);
    return *memory ? OK : OUT_OF_MEMORY;
}
Error aclrtFreeHost(void *memory) { free(memory); return OK; }
Error aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) { memmove(to, from, size); return OK; }
Error aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    memmove(to, from, size);
    return OK;
}
Error aclrtMemset(void *to, size_t room, int32_t value, size_t size) { memset(to, value, size); return OK; }
Error aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, void *stream) {
    memset(to, value, size);
    return OK;
}
Error aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = capacity();
    begin();
    *free_bytes = capacity() - used(device);
    end();
    return OK;
}
Error aclrtPointerGetAttributes(const void *pointer, uint32_t *attributes) {
    attributes[0] = device;
    attributes[1] = 0;
    return OK;
}
Error aclrtHostRegister(void *memory, uint64_t size, int kind, void **of_device) { *of_device = memory; return OK; }

/* Physical pages and virtual addresses. */
struct pages { int file; size_t size; int device; };
struct mapping { void *address; size_t size; struct mapping *next; };
static struct mapping *mappings;

static void *hole(void *at, size_t size, int flags) {
    return mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}
Error aclrtMemGetAllocationGranularity(void *property, int option, size_t *size) { *size = PAGE; return OK; }
Error aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *wanted, uint64_t flags) {
    char *found = hole(NULL, size + PAGE, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    *address = (void *)(((uintptr_t)found + PAGE - 1) & ~(uintptr_t)(PAGE - 1));
    return OK;
}
Error aclrtMallocPhysical(void **handle, size_t size, const void *property, uint64_t flags) {
    Error error = take(device, size);
    if (error) return error;
    struct pages *made = malloc(sizeof *made);
    *made = (struct pages){memfd_create("fake_npu", MFD_CLOEXEC), size, device};
    if (made->file < 0 || ftruncate(made->file, size)) { give_back(device, size); free(made); return OUT_OF_MEMORY; }
    *handle = made;
    return OK;
}
Error aclrtFreePhysical(void *handle) {
    struct pages *gone = handle;
    give_back(gone->device, gone->size);
    close(gone->file);
    free(gone);
    return OK;
}
Error aclrtMapMem(void *address, size_t size, size_t offset, void *handle, uint64_t flags) {
    struct pages *pages = handle;
    if (mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages->file, offset) == MAP_FAILED)
        return OUT_OF_MEMORY;
    struct mapping *made = malloc(sizeof *made);
    pthread_mutex_lock(&lock);
    *made = (struct mapping){address, size, mappings};
    mappings = made;
    pthread_mutex_unlock(&lock);
    return OK;
}
Error aclrtUnmapMem(void *address) {
    pthread_mutex_lock(&lock);
    struct mapping **link = &mappings, *gone;
    while (*link && (*link)->address != address) link = &(*link)->next;
    if ((gone = *link)) *link = gone->next;
    pthread_mutex_unlock(&lock);
    if (gone) hole(address, gone->size, MAP_FIXED);
    free(gone);
    return OK;
}

/* Streams and events. */
static Error made(void **object) { *object = malloc(64); return *object ? OK : OUT_OF_MEMORY; }
Error aclrtCreateStream(void **stream) { return made(stream); }
Error aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { return made(stream); }
Error aclrtStreamQuery(void *stream, int *state) { *state = 0; return OK; }
Error aclrtStreamGetId(void *stream, int32_t *number) { *number = 1; return OK; }
Error aclrtGetStreamAvailableNum(uint32_t *count) { *count = 1000; return OK; }
Error aclrtCreateEvent(void **event) { return made(event); }
Error aclrtCreateEventWithFlag(void **event, uint32_t flags) { return made(event); }
Error aclrtCreateEventExWithFlag(void **event, uint32_t flags) { return made(event); }
Error aclrtQueryEvent(void *event, int *state) { *state = 0; return OK; }
Error aclrtQueryEventStatus(void *event, int *state) { *state = 1; return OK; }
Error aclrtQueryEventWaitStatus(void *event, int *state) { *state = 1; return OK; }
Error aclrtEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 1; return OK; }
Error aclmdlRICaptureGetInfo(void *stream, int *state, void **graph) { *state = 0; *graph = NULL; return OK; }

/* Operators are never run through ACL here; what describes them must be something. */
void *aclopCreateAttr(void) { return malloc(64); }
void *aclCreateDataBuffer(void *memory, size_t size) { return malloc(64); }
void *aclCreateTensorDesc(int type, int rank, const int64_t *sizes, int format) { return malloc(64); }
size_t aclGetCompileoptSize(int option) { return 64; }
Error aclGetCompileopt(int option, char *value, size_t size) { memset(value, 0, size); return OK; }
