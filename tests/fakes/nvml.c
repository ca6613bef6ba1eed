/* A libnvidia-ml.so.1 for tests: it tells what a text file says, so that any host can have any GPUs.
 *
 * The file is named by FAKE_NVML_STATE and read again whenever it has changed. One `key value` a line; lines before
 * the first `gpu` are about the library, `gpu` and `mig` begin a device. What a device has no line for is "not
 * supported"; a value `!15` is the error 15. `hang <call> <path>` lets that call wait until <path> is gone, `log
 * <path>` writes the name of every call there, `delay_us <n>` makes every call take so long.
 *
 * Structures and numbers are those pynvml uses. `-DSOME_CALL=anything_else` builds a library without that call,
 * `-DINIT_FAILS=18` one that never gets started.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9 };
enum { MAX_SECTIONS = 128, MAX_LINES = 64, MAX_TEXT = 256, RECOVERY_ACTION_FIELD = 230 };

typedef struct {
    enum { LIBRARY, GPU, MIG } kind;
    int lines;
    char key[MAX_LINES][32];
    char value[MAX_LINES][MAX_TEXT];
} section;

static section sections[MAX_SECTIONS + 1]; /* the first is the library's own, the last stays empty */
static int section_count;
static struct stat read_state;
static int initialized; /* how many more times than shut down */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void parse(FILE *file) {
    char line[MAX_TEXT + 64];
    memset(sections, 0, sizeof sections);
    section_count = 1;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *value = line + strcspn(line, " ");
        if (*value) *value++ = 0;
        if ((!strcmp(line, "gpu") || !strcmp(line, "mig")) && section_count < MAX_SECTIONS) {
            sections[section_count++].kind = *line == 'g' ? GPU : MIG;
            continue;
        }
        section *current = &sections[section_count - 1];
        if (!*line || current->lines == MAX_LINES) continue;
        snprintf(current->key[current->lines], sizeof current->key[0], "%.31s", line);
        snprintf(current->value[current->lines++], MAX_TEXT, "%.255s", value);
    }
}

static int refresh(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat now;
    if (!path || stat(path, &now)) return 0;
    if (now.st_ino == read_state.st_ino && now.st_mtim.tv_nsec == read_state.st_mtim.tv_nsec &&
        now.st_mtim.tv_sec == read_state.st_mtim.tv_sec)
        return 1;
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    parse(file);
    fclose(file);
    read_state = now;
    return 1;
}

/* The nth value of a key, or NULL. */
static const char *find(const section *where, const char *key, int nth) {
    for (int i = 0; i < where->lines; i++)
        if (!strcmp(where->key[i], key) && nth-- == 0) return where->value[i];
    return NULL;
}

static void take_time(long microseconds) {
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do /* sleeping would take at least 50 microseconds, whatever was asked */
        clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - start.tv_sec) * 1000000L + (now.tv_nsec - start.tv_nsec) / 1000 < microseconds);
}

/* What every call begins with: log it, take the time, hang. The lock is not held meanwhile. */
static void begin(const char *call) {
    char hang_path[MAX_TEXT] = "", log_path[MAX_TEXT] = "";
    long delay = 0;
    pthread_mutex_lock(&lock);
    if (refresh()) {
        const char *text;
        for (int i = 0; (text = find(sections, "hang", i)); i++)
            if (!strncmp(text, call, strlen(call)) && text[strlen(call)] == ' ')
                snprintf(hang_path, sizeof hang_path, "%s", text + strlen(call) + 1);
        if ((text = find(sections, "log", 0))) snprintf(log_path, sizeof log_path, "%s", text);
        if ((text = find(sections, "delay_us", 0))) delay = atol(text);
    }
    pthread_mutex_unlock(&lock);
    if (*log_path) {
        FILE *log = fopen(log_path, "a");
        if (log) fprintf(log, "%s\n", call), fclose(log);
    }
    if (delay) take_time(delay);
    while (*hang_path && !access(hang_path, F_OK)) usleep(2000);
}

/* Call `call` for a section: its error, or OK and the text of the nth line of that key. */
static int look_up(const section *where, const char *call, int nth, char text[MAX_TEXT]) {
    int result = NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    const char *value = refresh() ? find(where, call, nth) : NULL;
    const char *everywhere = find(sections, call, 0); /* an error the library gives for all devices */
    if (everywhere && *everywhere == '!') value = everywhere;
    if (!initialized) result = UNINITIALIZED;
    else if (value && *value == '!') result = atoi(value + 1);
    else if (value) { snprintf(text, MAX_TEXT, "%s", value); result = OK; }
    pthread_mutex_unlock(&lock);
    return result;
}

static int ask(const section *where, const char *call, char text[MAX_TEXT]) {
    begin(call);
    return look_up(where, call, 0, text);
}

static int ask_number(const section *where, const char *call, unsigned *number) {
    char text[MAX_TEXT];
    int result = ask(where, call, text);
    if (result == OK) *number = (unsigned)strtoul(text, NULL, 10);
    return result;
}

static int ask_text(const section *where, const char *call, char *answer, unsigned size) {
    char text[MAX_TEXT];
    int result = ask(where, call, text);
    if (result == OK) snprintf(answer, size, "%s", text);
    return result;
}

/* --- the library --- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    char text[MAX_TEXT];
    begin("init");
#ifdef INIT_FAILS
    return INIT_FAILS;
#endif
    pthread_mutex_lock(&lock);
    int is_there = refresh();
    initialized++;
    pthread_mutex_unlock(&lock);
    int result = is_there ? look_up(sections, "init", 0, text) : DRIVER_NOT_LOADED;
    if (result == NOT_SUPPORTED) result = OK; /* nothing said about it */
    if (result != OK) initialized--;
    return result;
}

int nvmlShutdown(void) {
    char text[MAX_TEXT];
    int result = ask(sections, "shutdown", text);
    if (result != OK && result != NOT_SUPPORTED) return result;
    initialized--;
    return OK;
}

const char *nvmlErrorString(int result) {
    static char text[64];
    snprintf(text, sizeof text, "fake error %d", result);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    return ask_text(sections, "driver_version", version, size);
}

/* --- the devices --- */

int nvmlDeviceGetCount_v2(unsigned *count) {
    char text[MAX_TEXT];
    int result = ask(sections, "count", text);
    if (result != OK && result != NOT_SUPPORTED) return result;
    *count = 0;
    for (int i = 0; i < section_count; i++) *count += sections[i].kind == GPU;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, section **device) {
    char text[MAX_TEXT];
    begin("handle");
    for (int i = 0; i < section_count; i++)
        if (sections[i].kind == GPU && index-- == 0) {
            int result = look_up(&sections[i], "handle", 0, text);
            *device = &sections[i];
            return result == NOT_SUPPORTED ? OK : result;
        }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetName(section *device, char *name, unsigned size) { return ask_text(device, "name", name, size); }

int nvmlDeviceGetUUID(section *device, char *uuid, unsigned size) { return ask_text(device, "uuid", uuid, size); }

typedef struct { char legacy_bus_id[16]; unsigned domain, bus, device, ids, more_ids; char bus_id[32]; } pci_info;

int nvmlDeviceGetPciInfo_v3(section *device, pci_info *info) {
    return ask_text(device, "pci", info->bus_id, sizeof info->bus_id);
}

typedef struct { uint64_t total, free, used; } memory_v1;
typedef struct { unsigned version; uint64_t total, reserved, free, used; } memory_v2;

/* In bytes: total, reserved, used, free. */
int nvmlDeviceGetMemoryInfo_v2(section *device, memory_v2 *memory) {
    char text[MAX_TEXT];
    int result = ask(device, "memory", text);
    if (result == OK)
        sscanf(text, "%lu %lu %lu %lu", &memory->total, &memory->reserved, &memory->used, &memory->free);
    return result;
}

/* The old call has no `reserved`: it counts that as used. */
int nvmlDeviceGetMemoryInfo(section *device, memory_v1 *memory) {
    char text[MAX_TEXT];
    uint64_t reserved = 0;
    int result = ask(device, "memory", text);
    if (result == OK) {
        sscanf(text, "%lu %lu %lu %lu", &memory->total, &reserved, &memory->used, &memory->free);
        memory->used += reserved;
    }
    return result;
}

typedef struct { unsigned gpu, memory; } utilization;

int nvmlDeviceGetUtilizationRates(section *device, utilization *rates) {
    rates->memory = 0;
    return ask_number(device, "utilization", &rates->gpu);
}

int nvmlDeviceGetTemperature(section *device, unsigned sensor, unsigned *celsius) {
    return sensor ? INVALID_ARGUMENT : ask_number(device, "temperature", celsius);
}

int nvmlDeviceGetPowerUsage(section *device, unsigned *milliwatts) {
    return ask_number(device, "power_draw", milliwatts);
}

int nvmlDeviceGetEnforcedPowerLimit(section *device, unsigned *milliwatts) {
    return ask_number(device, "power_limit", milliwatts);
}

/* Only the uncorrected ones (1) since the driver was loaded (0). */
int nvmlDeviceGetTotalEccErrors(section *device, unsigned type, unsigned counter, uint64_t *count) {
    char text[MAX_TEXT];
    if (type != 1 || counter != 0) return INVALID_ARGUMENT;
    int result = ask(device, "ecc", text);
    if (result == OK) *count = strtoull(text, NULL, 10);
    return result;
}

typedef struct {
    uint32_t id, scope;
    int64_t timestamp, latency;
    unsigned type;
    int result;
    union { uint32_t number; uint64_t large; } value;
} field_value;

/* Errors stand in each field; those of the whole call are those that concern the whole GPU. */
int nvmlDeviceGetFieldValues(section *device, int count, field_value *fields) {
    for (int i = 0; i < count; i++) {
        fields[i].type = 1;
        fields[i].result = fields[i].id == RECOVERY_ACTION_FIELD
                               ? ask_number(device, "recovery_action", &fields[i].value.number)
                               : NOT_SUPPORTED;
        if (fields[i].result == UNINITIALIZED || fields[i].result == 15) return fields[i].result;
    }
    return OK;
}

typedef struct { unsigned pid; uint64_t bytes; unsigned gpu_instance, compute_instance; } process;

/* `process <pid> <bytes>` once each, with -1 for bytes that are not known; `processes !4` for an error. */
static int list_processes(section *device, const char *call, const char *key, unsigned *count, process *found) {
    char text[MAX_TEXT];
    int result = ask(device, call, text);
    if (result != OK) return result;
    unsigned room = *count, seen = 0;
    for (; look_up(device, key, (int)seen, text) == OK; seen++) {
        if (seen >= room || !found) continue;
        long long bytes = -1;
        sscanf(text, "%u %lld", &found[seen].pid, &bytes);
        found[seen].bytes = (uint64_t)bytes;
        found[seen].gpu_instance = found[seen].compute_instance = 0xFFFFFFFFu;
    }
    *count = seen;
    return seen > room ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(section *device, unsigned *count, process *found) {
    return list_processes(device, "processes", "process", count, found);
}

int nvmlDeviceGetComputeRunningProcesses_v2(section *device, unsigned *count, process *found) {
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, found);
}

/* The same with `drawing` and `graphics`. */
int nvmlDeviceGetGraphicsRunningProcesses_v3(section *device, unsigned *count, process *found) {
    return list_processes(device, "graphics", "drawing", count, found);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(section *device, unsigned *count, process *found) {
    return nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, found);
}

/* --- how far two GPUs are: `distance_<index of the other> <n>`, with 0 for NVLink, else as NVML counts --- */

static int ask_distance(section *device, section *other, const char *call, unsigned *distance) {
    char text[MAX_TEXT], key[32];
    unsigned index = 0;
    for (section *each = sections + 1; each < other; each++) index += each->kind == GPU;
    snprintf(key, sizeof key, "distance_%u", index);
    begin(call);
    int result = look_up(device, call, 0, text);
    if (result == NOT_SUPPORTED) result = look_up(device, key, 0, text);
    if (result == OK) *distance = (unsigned)strtoul(text, NULL, 10);
    return result;
}

int nvmlDeviceGetP2PStatus(section *device, section *other, unsigned which, unsigned *status) {
    unsigned distance = 0;
    int result = which == 2 ? ask_distance(device, other, "p2p", &distance) : INVALID_ARGUMENT;
    if (result == OK) *status = distance ? 5 : 0; /* not supported, or fine */
    return result;
}

int nvmlDeviceGetTopologyCommonAncestor(section *device, section *other, unsigned *level) {
    return ask_distance(device, other, "topology", level);
}

/* --- MIG: the `mig` sections that follow a `gpu` are its slots, in order --- */

int nvmlDeviceGetMigMode(section *device, unsigned *current, unsigned *pending) {
    int result = ask_number(device, "mig_mode", current);
    *pending = *current;
    return result;
}

int nvmlDeviceGetMaxMigDeviceCount(section *device, unsigned *count) {
    begin("mig_count");
    for (*count = 0; device[*count + 1].kind == MIG;) ++*count;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(section *device, unsigned index, section **mig) {
    char text[MAX_TEXT];
    begin("mig_handle");
    *mig = device + 1 + index;
    for (unsigned i = 0; i <= index; i++)
        if (device[i + 1].kind != MIG) return INVALID_ARGUMENT;
    int result = look_up(*mig, "handle", 0, text);
    return result == NOT_SUPPORTED ? OK : result;
}

int nvmlDeviceGetGpuInstanceId(section *mig, unsigned *id) { return ask_number(mig, "gpu_instance", id); }

int nvmlDeviceGetComputeInstanceId(section *mig, unsigned *id) { return ask_number(mig, "compute_instance", id); }

/* Drivers since 2026 have it; nothing here calls it. */
int nvmlDeviceSetMemoryLimits_v1(section *device, void *limits) {
    (void)device;
    (void)limits;
    return 3;
}
