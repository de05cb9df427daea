/* A load generator: a closed loop of POST requests over kept connections. One thread, epoll.
 *
 *   load --port P --bodies FILE [--path /v1/completions] [--concurrency N] [--requests N] [--seconds S]
 *        [--ramp-ms X] [--stream 1] [--header "Name: value"]... [--limit-s S] [--first /v1/models]
 *
 * Each line of FILE is a body; the bodies are sent in turn. The program ends after --requests. After --seconds
 * it sends no new requests and waits for the running ones; it always ends --limit-s after its start.
 * Connections are opened over the first --ramp-ms, to 127.0.0.1 only. Prints one JSON object, with times in µs.
 *
 * With --first each connection begins with a GET of that path, which is not counted.
 *
 * An event of a stream ends with an empty line, and counts when its last byte is read; [DONE] is not counted.
 * A request fails unless it is answered completely and with 200, and a stream ends with [DONE].
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENT_BATCH = 256, READ_SIZE = 1 << 16, HEAD_SIZE = 8192, MAX_SAMPLES = 4 << 20, MAX_STREAMS = 20000,
       MAX_BODIES = 4096, STALL_US = 35000 };
enum phase { CLOSED, WAITING, IN_HEAD, IN_LENGTH, IN_CHUNK_LINE, IN_CHUNK, AFTER_CHUNK, IN_TRAILER, UNTIL_CLOSE };

struct samples { uint32_t *us; long len, size; };
struct body { char *bytes; size_t len; };
struct stream {
    int fd;
    enum phase phase;
    int status, is_ending, is_fresh, has_data, is_newline;
    const struct body *body, *after_first;
    size_t sent, left, head_len, line_len;
    uint64_t start, last_event;
    long events;
    char tail[8];                 /* the last bytes of the payload: is [DONE] among them? */
    char head[HEAD_SIZE];
};

static struct stream *streams;
static struct body bodies[MAX_BODIES], first;
static struct samples latency, ttft, gap;
static long body_count, requests = 1000000000, issued, completed, failed, events, reopened, open_now, open_most;
static long stalls, bytes_in, answered;
static uint32_t longest_gap;
static double seconds = 60, limit_s = 120, ramp_ms;
static int port, concurrency = 1, is_stream, epoll_fd;
static char first_failure[160];
static uint64_t began, ended;

static void die(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

/* Keeps the first MAX_SAMPLES. */
static void add(struct samples *to, uint64_t us) {
    if (to->len == to->size) {
        if (to->size >= MAX_SAMPLES) return;
        to->size = to->size ? 2 * to->size : 4096;
        if (!(to->us = realloc(to->us, (size_t)to->size * sizeof *to->us))) die("memory");
    }
    to->us[to->len++] = us > UINT32_MAX ? UINT32_MAX : (uint32_t)us;
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void fail(struct stream *s, const char *why) {
    failed++;
    if (!first_failure[0]) snprintf(first_failure, sizeof first_failure, "%s (status %d)", why, s->status);
}

static void hang_up(struct stream *s) {
    if (s->fd >= 0) close(s->fd);
    s->fd = -1;
    s->phase = CLOSED;
}

static void watch(struct stream *s, int operation, uint32_t what) {
    struct epoll_event e = {.events = what, .data.ptr = s};
    if (epoll_ctl(epoll_fd, operation, s->fd, &e)) die("epoll_ctl");
}

static void connect_again(struct stream *s) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int on = 1;
    s->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (s->fd < 0) die("socket (is the limit of open files high enough?)");
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(s->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) die("connect");
    s->is_fresh = 1;
    if (first.len) s->after_first = s->body, s->body = &first;
    watch(s, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT);
}

static void push(struct stream *s) {
    while (s->sent < s->body->len) {
        ssize_t sent = send(s->fd, s->body->bytes + s->sent, s->body->len - s->sent, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == ENOTCONN)) {
            watch(s, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
            return;
        }
        if (sent < 0) return;     /* the read fails as well, with the reason */
        s->sent += (size_t)sent;
    }
}

static void begin(struct stream *s) {
    s->sent = s->head_len = s->line_len = 0;
    s->status = s->is_ending = s->has_data = s->is_newline = 0;
    s->events = 0;
    s->phase = WAITING;
    memset(s->tail, 0, sizeof s->tail);
    int is_new = s->fd < 0;
    if (is_new) connect_again(s);
    s->start = now_us();
    s->last_event = 0;
    if (!is_new) push(s);
}

static void next(struct stream *s) {
    if (issued >= requests || now_us() - began > (uint64_t)(seconds * 1e6)) {
        hang_up(s);
        return;
    }
    s->body = &bodies[issued++ % body_count];
    begin(s);
}

static void finish(struct stream *s, const char *why) {
    uint64_t now = now_us();
    if (s->body == &first && !why && s->status == 200 && !s->is_ending) {
        s->body = s->after_first;
        s->is_fresh = 0;
        begin(s);
        return;
    }
    if (s->body == &first && !why) why = "the request of --first is not answered with 200 and keep-alive";
    if (s->has_data) open_now--;
    if (!why && s->status != 200) why = "not answered with 200";
    if (!why && is_stream && memcmp(s->tail, "[DONE]\n\n", 8)) why = "a stream without [DONE] at its end";
    if (why) fail(s, why);
    else add(&latency, now - s->start), completed++, events -= is_stream;
    ended = now;
    s->is_fresh = 0;
    if (why || s->is_ending) hang_up(s);
    next(s);
}

static void count_events(struct stream *s, const char *at, size_t len, uint64_t now) {
    long before = s->events;
    if (!s->has_data && len) {
        s->has_data = 1;
        if (++open_now > open_most) open_most = open_now;
        add(&ttft, now - s->start);
        stalls += now - s->start >= STALL_US;
    }
    for (const char *end = at + len; at < end;) {
        if (*at == '\n' && s->is_newline) s->events++, s->is_newline = 0, at++;
        else if (*at == '\n') s->is_newline = 1, at++;
        else if (*at == '\r') at++;
        else {
            s->is_newline = 0;
            if (!(at = memchr(at, '\n', (size_t)(end - at)))) break;
        }
    }
    if (s->events == before) return;
    events += s->events - before;
    if (s->last_event) {
        uint64_t waited = now - s->last_event;
        add(&gap, waited);
        if (waited >= STALL_US) stalls++;
        if (waited > longest_gap) longest_gap = (uint32_t)waited;
    }
    s->last_event = now;
}

static void payload(struct stream *s, const char *at, size_t len, uint64_t now) {
    size_t keep = len < sizeof s->tail ? len : sizeof s->tail;
    if (is_stream) count_events(s, at, len, now);
    memmove(s->tail, s->tail + keep, sizeof s->tail - keep);
    memcpy(s->tail + sizeof s->tail - keep, at + len - keep, keep);
}

static const char *header(const char *head, const char *name) {
    const char *at = strcasestr(head, name);
    return at ? at + strlen(name) : NULL;
}

static const char *read_head(struct stream *s) {
    if (sscanf(s->head, "HTTP/1.%*d %d", &s->status) != 1) return "no HTTP answer";
    if (s->status == 100) {
        s->head_len = 0;
        return NULL;
    }
    const char *length = header(s->head, "\ncontent-length:");
    s->is_ending = strcasestr(s->head, "\nconnection: close") != NULL;
    s->phase = UNTIL_CLOSE;
    if (header(s->head, "\ntransfer-encoding: chunked")) s->phase = IN_CHUNK_LINE;
    else if (length) s->left = strtoul(length, NULL, 10), s->phase = IN_LENGTH;
    return NULL;
}

/* Parse what was read. Returns how much of it belongs to this answer; sets `why` if it is invalid. */
static size_t take(struct stream *s, const char *bytes, size_t len, uint64_t now, int *is_over, const char **why) {
    const char *at = bytes, *end = bytes + len;
    if (s->phase == WAITING) s->phase = IN_HEAD;
    while ((at < end || (s->phase == IN_LENGTH && !s->left)) && !*is_over && !*why) {
        size_t there = (size_t)(end - at), part = there < s->left ? there : s->left;
        switch (s->phase) {
        case IN_HEAD:
            if (s->head_len == HEAD_SIZE - 1) *why = "too long a head";
            else s->head[s->head_len++] = *at++;
            if (s->head_len > 3 && !memcmp(s->head + s->head_len - 4, "\r\n\r\n", 4)) {
                s->head[s->head_len] = 0;
                *why = read_head(s);
            }
            break;
        case IN_CHUNK_LINE:
        case IN_TRAILER:
            if (*at != '\n') {
                if (s->line_len < HEAD_SIZE - 1 && *at != '\r') s->head[s->line_len++] = *at;
            } else {
                s->head[s->line_len] = 0;
                if (s->phase == IN_TRAILER) *is_over = !s->line_len;
                else s->left = strtoul(s->head, NULL, 16), s->phase = s->left ? IN_CHUNK : IN_TRAILER;
                s->line_len = 0;
            }
            at++;
            break;
        case AFTER_CHUNK:
            if (*at++ == '\n') s->phase = IN_CHUNK_LINE;
            break;
        case UNTIL_CLOSE:
            part = there;
            s->left += part;      /* falls through */
        default:
            payload(s, at, part, now);
            at += part;
            s->left -= part;
            if (s->phase == IN_LENGTH && !s->left) *is_over = 1;
            if (s->phase == IN_CHUNK && !s->left) s->phase = AFTER_CHUNK;
        }
    }
    return (size_t)(at - bytes);
}

static void closed(struct stream *s) {
    if (s->phase == UNTIL_CLOSE) {
        s->is_ending = 1;
        finish(s, NULL);
    } else if (s->phase == WAITING && !s->is_fresh) {   /* closed while idle: the worker did not get the request */
        reopened++;
        hang_up(s);
        begin(s);
    } else {
        finish(s, "the connection was closed or refused");
    }
}

static void serve_stream(struct stream *s, uint32_t what) {
    static char bytes[READ_SIZE];
    if (what & EPOLLOUT) {
        watch(s, EPOLL_CTL_MOD, EPOLLIN);
        push(s);
    }
    if (!(what & (EPOLLIN | EPOLLERR | EPOLLHUP))) return;
    ssize_t got = recv(s->fd, bytes, READ_SIZE, 0);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        closed(s);
        return;
    }
    int is_over = 0;
    const char *why = NULL;
    bytes_in += got;
    answered += s->phase == WAITING;
    size_t used = take(s, bytes, (size_t)got, now_us(), &is_over, &why);
    if (is_over && used < (size_t)got) why = "bytes after the end of an answer";
    if (is_over || why) finish(s, why);
}

static void print_samples(const char *name, struct samples *of) {
    static const struct { const char *name; double part; } parts[] = {{"p50", .5}, {"p90", .9}, {"p99", .99}};
    qsort(of->us, (size_t)of->len, sizeof *of->us, by_size);
    for (int i = 0; i < 3; i++) {
        long at = (long)(parts[i].part * (double)of->len);
        printf("\"%s_%s_us\": %u, ", name, parts[i].name, of->len ? of->us[at < of->len ? at : of->len - 1] : 0);
    }
}

static void report(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                 (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"requests\": %ld, \"errors\": %ld, \"first_error\": \"%s\", \"reopened\": %ld, \"seconds\": %.6f, ",
           completed, failed, first_failure, reopened, (double)((ended ? ended : now_us()) - began) / 1e6);
    print_samples("latency", &latency);
    print_samples("ttft", &ttft);
    print_samples("gap", &gap);
    printf("\"gap_max_us\": %u, \"stalls\": %ld, \"events\": %ld, \"streams_open\": %ld, \"bytes\": %ld, \"cpu_s\": %.6f}\n",
           longest_gap, stalls, events, open_most, bytes_in, cpu);
}

/* Each line of the file becomes a whole request, head and body. */
static void read_bodies(const char *name, const char *path, const char *more) {
    FILE *file = fopen(name, "r");
    if (!file) die(name);
    char *line = NULL;
    size_t size = 0;
    ssize_t len;
    while (body_count < MAX_BODIES && (len = getline(&line, &size, file)) > 0) {
        if (line[len - 1] == '\n') len--;
        char *whole = malloc((size_t)len + 1024 + strlen(more) + strlen(path));
        if (!whole) die("memory");
        int head = sprintf(whole, "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                           "%sContent-Length: %zd\r\n\r\n", path, port, more, len);
        memcpy(whole + head, line, (size_t)len);
        bodies[body_count++] = (struct body){whole, (size_t)head + (size_t)len};
    }
    free(line);
    fclose(file);
}

static void usage(void) {
    fprintf(stderr, "usage: load --port P --bodies FILE [--path PATH] [--concurrency N] [--requests N] [--seconds S]\n"
                    "            [--ramp-ms X] [--stream 1] [--header \"Name: value\"]... [--limit-s S] [--first PATH]\n");
    exit(2);
}

static void run(void) {
    int opened = 0;
    struct epoll_event ready[EVENT_BATCH];
    began = now_us();
    for (;;) {
        double passed_ms = (double)(now_us() - began) / 1e3;
        while (opened < concurrency && passed_ms >= ramp_ms * opened / concurrency) next(&streams[opened++]);
        int busy = opened < concurrency && issued < requests && passed_ms < seconds * 1e3;
        for (int i = 0; i < opened && !busy; i++) busy = streams[i].phase != CLOSED;
        if (!busy) return;
        if (passed_ms > limit_s * 1e3) {
            for (int i = 0; i < opened; i++)
                if (streams[i].phase != CLOSED) fail(&streams[i], "not over at --limit-s");
            return;
        }
        int count = epoll_wait(epoll_fd, ready, EVENT_BATCH, opened < concurrency ? 1 : 100);
        if (count < 0 && errno != EINTR) die("epoll_wait");
        for (int i = 0; i < count; i++) serve_stream(ready[i].data.ptr, ready[i].events);
    }
}

int main(int argc, char **argv) {
    const char *path = "/v1/completions", *file = NULL, *get = NULL;
    char more[4096] = "";
    struct rlimit files;
    for (int i = 1; i < argc; i += 2) {
        const char *flag = argv[i], *value = argv[i + 1];
        if (i + 1 == argc) usage();
        if (!strcmp(flag, "--port")) port = atoi(value);
        else if (!strcmp(flag, "--path")) path = value;
        else if (!strcmp(flag, "--bodies")) file = value;
        else if (!strcmp(flag, "--concurrency")) concurrency = atoi(value);
        else if (!strcmp(flag, "--requests")) requests = atol(value);
        else if (!strcmp(flag, "--seconds")) seconds = atof(value);
        else if (!strcmp(flag, "--ramp-ms")) ramp_ms = atof(value);
        else if (!strcmp(flag, "--stream")) is_stream = atoi(value);
        else if (!strcmp(flag, "--limit-s")) limit_s = atof(value);
        else if (!strcmp(flag, "--first")) get = value;
        else if (!strcmp(flag, "--header") && strlen(more) + strlen(value) + 3 < sizeof more)
            strcat(strcat(more, value), "\r\n");
        else usage();
    }
    if (!port || !file || concurrency < 1 || concurrency > MAX_STREAMS || limit_s > 3600) usage();
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    read_bodies(file, path, more);
    static char asked[512];
    if (get) first = (struct body){asked, (size_t)snprintf(asked, sizeof asked, "GET %.300s HTTP/1.1\r\n"
                                                           "Host: 127.0.0.1:%d\r\n\r\n", get, port)};
    if (!body_count) {
        fprintf(stderr, "load: %s holds no body\n", file);
        return 2;
    }
    if ((epoll_fd = epoll_create1(EPOLL_CLOEXEC)) < 0) die("epoll_create1");
    if (!(streams = calloc((size_t)concurrency, sizeof *streams))) die("memory");
    for (int i = 0; i < concurrency; i++) streams[i].fd = -1;
    run();
    report();
    return 0;
}
