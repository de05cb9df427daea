/* A fake engine: answers completions at once, or streams SSE events at a fixed pace. One thread, epoll.
 *
 *   worker --port P [--port P]... [--events N] [--pace-ms X] [--model NAME] [--prompt-tokens N] [--seconds S]
 *
 * Each port is an engine, or several by the beginnings of paths. The first event of a stream leaves --pace-ms after its request has arrived, so a longer
 * wait of the client is caused by the router. After that the engine works in steps of --pace-ms: in each step all
 * its streams get an event, as with continuous batching. The steps of several ports are spread evenly. The head
 * of a stream leaves at once, as from uvicorn. A stream has `max_tokens` events (default: --events).
 * A request body needs a content-length. Ends on SIGTERM, or after --seconds. Listens on 127.0.0.1 only.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PORTS = 64, MAX_BODY = 64 << 20, EVENT_BATCH = 256, FIRST_BUFFER = 4096, SHRINK_ABOVE = 1 << 16 };

struct connection {
    int fd;
    int at;                       /* place in the heap of streams, -1 without a stream */
    char *in;                     /* read, and not yet answered */
    size_t in_len, in_size;
    char *out;                    /* not yet accepted by the socket */
    size_t out_len, out_sent, out_size;
    uint64_t due, offset;         /* time of the next event; offset of its engine's steps */
    long left;                    /* events of this stream still to send */
    int is_chat, is_closing;
};

static int epoll_fd, timer_fd;
static long events_a_stream = 64, prompt_tokens = 8;
static uint64_t pace_ns = 5000000, armed;
static const char *model = "mock";
static volatile sig_atomic_t is_stopped;

static char answer[2][1024], models_answer[1024], head[512], event[2][512], last[2][1024];
static int answer_len[2], models_len, head_len, event_len[2], last_len[2];
static const char ok[] = "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 3\r\n\r\nok\n";
static const char refusal[] = "HTTP/1.1 411 Length Required\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
static const char missing[] = "HTTP/1.1 404 Not Found\r\ncontent-type: text/plain\r\ncontent-length: 10\r\n\r\nnot found\n";

static struct connection **heap;  /* streams, the one whose event is due first at the top */
static int heap_len, heap_size;

static void die(const char *what) {
    fprintf(stderr, "worker: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void place(struct connection *c, int at) {
    heap[at] = c;
    c->at = at;
}

static void sift(struct connection *c, int at) {
    while (at > 0 && c->due < heap[(at - 1) / 2]->due) {
        place(heap[(at - 1) / 2], at);
        at = (at - 1) / 2;
    }
    for (;;) {
        int child = 2 * at + 1;
        if (child >= heap_len) break;
        if (child + 1 < heap_len && heap[child + 1]->due < heap[child]->due) child++;
        if (c->due <= heap[child]->due) break;
        place(heap[child], at);
        at = child;
    }
    place(c, at);
}

static void start_stream(struct connection *c, long count) {
    if (heap_len == heap_size) {
        heap_size = heap_size ? 2 * heap_size : 256;
        if (!(heap = realloc(heap, (size_t)heap_size * sizeof *heap))) die("memory");
    }
    c->left = count;
    c->due = now_ns() + pace_ns;
    heap_len++;
    sift(c, heap_len - 1);
}

static void end_stream(struct connection *c) {
    int at = c->at;
    struct connection *moved = heap[--heap_len];
    c->at = -1;
    if (moved != c) sift(moved, at);
}

static void arm(void) {
    uint64_t due = heap_len ? heap[0]->due : 0;
    if (due == armed) return;
    struct itimerspec when = {.it_value = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)}};
    if (timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL)) die("timerfd_settime");
    armed = due;
}

static void drop(struct connection *c) {
    if (c->at >= 0) end_stream(c);
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

static void watch(struct connection *c, uint32_t what) {
    struct epoll_event e = {.events = what, .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e)) die("epoll_ctl");
}

/* Send, and keep what the socket does not accept. Returns 0 if the connection is gone. */
static int send_bytes(struct connection *c, const char *bytes, size_t len) {
    if (!c->out_len) {
        ssize_t sent = send(c->fd, bytes, len, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return 0;
        if (sent > 0) bytes += sent, len -= (size_t)sent;
        if (!len) return 1;
        watch(c, EPOLLIN | EPOLLOUT);
    }
    if (c->out_len + len > c->out_size) {
        c->out_size = 2 * (c->out_len + len);
        if (!(c->out = realloc(c->out, c->out_size))) die("memory");
    }
    memcpy(c->out + c->out_len, bytes, len);
    c->out_len += len;
    return 1;
}

static int flush(struct connection *c) {
    ssize_t sent = send(c->fd, c->out + c->out_sent, c->out_len - c->out_sent, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN;
    c->out_sent += (size_t)sent;
    if (c->out_sent == c->out_len) {
        c->out_len = c->out_sent = 0;
        watch(c, EPOLLIN);
    }
    return 1;
}

/* Send an event of a stream; the last one includes the end. Returns 0 if the connection is gone. */
static int send_event(struct connection *c) {
    if (--c->left > 0) return send_bytes(c, event[c->is_chat], (size_t)event_len[c->is_chat]);
    end_stream(c);
    return send_bytes(c, last[c->is_chat], (size_t)last_len[c->is_chat]);
}

static const char *header(const char *from, const char *to, const char *name) {
    size_t len = strlen(name);
    for (const char *line = from; line && line < to; line = memchr(line, '\n', (size_t)(to - line))) {
        if (*line == '\n') line++;
        if ((size_t)(to - line) > len && !strncasecmp(line, name, len) && line[len] == ':') {
            for (line += len + 1; *line == ' '; line++) {}
            return line;
        }
    }
    return NULL;
}

static long number_after(const char *body, size_t len, const char *key, long otherwise) {
    const char *at = memmem(body, len, key, strlen(key)), *end = body + len;
    if (!at) return otherwise;
    for (at += strlen(key); at < end && (*at == ' ' || *at == ':'); at++) {}
    return at < end && *at >= '0' && *at <= '9' ? strtol(at, NULL, 10) : otherwise;
}

static int wants_stream(const char *body, size_t len) {
    const char *at = memmem(body, len, "\"stream\"", 8), *end = body + len;
    if (!at) return 0;
    for (at += 8; at < end && (*at == ' ' || *at == ':'); at++) {}
    return end - at >= 4 && !memcmp(at, "true", 4);
}

static int respond(struct connection *c, const char *head_at, const char *body, size_t len) {
    const char *path = strchr(head_at, ' ') + 1, *below = memmem(path, strcspn(path, " "), "/v1/", 4);
    if (below) path = below;
    int is_chat = !strncmp(path, "/v1/chat/completions ", 21);
    if (!is_chat && strncmp(path, "/v1/completions ", 16)) {
        if (!strncmp(path, "/v1/models ", 11)) return send_bytes(c, models_answer, (size_t)models_len);
        if (!strncmp(path, "/health", 7) || !strncmp(path, "/get_", 5) || !strncmp(path, "/metrics", 8))
            return send_bytes(c, ok, sizeof ok - 1);
        return send_bytes(c, missing, sizeof missing - 1);
    }
    if (!wants_stream(body, len)) return send_bytes(c, answer[is_chat], (size_t)answer_len[is_chat]);
    c->is_chat = is_chat;
    long count = number_after(body, len, "\"max_tokens\"", events_a_stream);
    if (!send_bytes(c, head, (size_t)head_len)) return 0;
    start_stream(c, count > 0 ? count : 1);
    while (!pace_ns && c->at >= 0)
        if (!send_event(c)) return 0;
    return 1;
}

/* Answer all complete requests. Returns 0 if the connection must be closed. */
static int answer_all(struct connection *c) {
    size_t done = 0;
    while (c->at < 0 && done < c->in_len) {
        char *from = c->in + done, *end = c->in + c->in_len;
        char *body = memmem(from, (size_t)(end - from), "\r\n\r\n", 4);
        if (!body) break;
        body += 4;
        const char *length = header(from, body, "content-length"), *connection = header(from, body, "connection");
        size_t len = length ? strtoul(length, NULL, 10) : 0;
        if (len > MAX_BODY || !memchr(from, ' ', (size_t)(body - from))) return 0;
        if (header(from, body, "transfer-encoding")) return send_bytes(c, refusal, sizeof refusal - 1) && 0;
        if (len > (size_t)(end - body)) break;
        if (connection && !strncasecmp(connection, "close", 5)) c->is_closing = 1;
        if (!respond(c, from, body, len)) return 0;
        done = (size_t)(body + len - c->in);
    }
    memmove(c->in, c->in + done, c->in_len - done);
    c->in_len -= done;
    if (!c->in_len && c->in_size > SHRINK_ABOVE) {
        free(c->in);
        c->in = NULL;
        c->in_size = 0;
    }
    return !(c->is_closing && c->at < 0 && !c->out_len);
}

static int read_some(struct connection *c) {
    for (;;) {
        if (c->in_len + 1 >= c->in_size) {
            if (c->in_size > MAX_BODY) return 0;
            c->in_size = c->in_size ? 4 * c->in_size : FIRST_BUFFER;
            if (!(c->in = realloc(c->in, c->in_size))) die("memory");
        }
        size_t room = c->in_size - c->in_len - 1;
        ssize_t got = recv(c->fd, c->in + c->in_len, room, 0);
        if (got == 0) return 0;
        if (got < 0) return errno == EAGAIN;
        c->in_len += (size_t)got;
        c->in[c->in_len] = 0;
        if ((size_t)got < room) return 1;
    }
}

static void take(int listener, uint64_t offset) {
    for (int fd, on = 1; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *c = calloc(1, sizeof *c);
        if (!c) die("memory");
        c->fd = fd;
        c->at = -1;
        c->offset = offset;
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e)) die("epoll_ctl");
    }
    if (errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) die("accept (too few open files?)");
}

static void serve_connection(struct connection *c, uint32_t what) {
    int is_alive = !(what & (EPOLLERR | EPOLLHUP));
    if (is_alive && what & EPOLLIN) is_alive = read_some(c) && answer_all(c);
    if (is_alive && what & EPOLLOUT && c->out_len) is_alive = flush(c);
    if (!is_alive) drop(c);
}

static void send_due(void) {
    uint64_t now = now_ns();
    while (heap_len && heap[0]->due <= now) {
        struct connection *c = heap[0];
        c->due += pace_ns - (c->due - c->offset) % pace_ns;
        sift(c, 0);
        if (!send_event(c) || (c->at < 0 && !answer_all(c))) drop(c);
    }
}

static int print_into(char *to, size_t size, const char *format, ...) {
    va_list more;
    va_start(more, format);
    int len = vsnprintf(to, size, format, more);
    va_end(more);
    if (len < 0 || (size_t)len >= size) die("--model is too long");
    return len;
}

static int with_head(char *to, size_t size, const char *body) {
    return print_into(to, size, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                      strlen(body), body);
}

static int chunked(char *to, size_t size, const char *data, const char *after) {
    return print_into(to, size, "%zx\r\n%s\r\n%s", strlen(data), data, after);
}

static void make_answers(void) {
    char body[800], usage[100];
    print_into(usage, sizeof usage, "\"usage\":{\"prompt_tokens\":%ld,\"completion_tokens\":8,\"total_tokens\":%ld}",
               prompt_tokens, prompt_tokens + 8);
    const char *choice[2] = {"\"text\":\" word\"", "\"message\":{\"role\":\"assistant\",\"content\":\" word\"}"};
    const char *delta[2] = {"\"text\":\" word\"", "\"delta\":{\"content\":\" word\"}"};
    const char *id[2] = {"cmpl-1", "chatcmpl-1"}, *kind[2] = {"text_completion", "chat.completion"};
    for (int chat = 0; chat < 2; chat++) {
        print_into(body, sizeof body,
                   "{\"id\":\"%s\",\"object\":\"%s\",\"created\":1,\"model\":\"%s\",\"choices\":[{\"index\":0,%s,"
                   "\"finish_reason\":\"length\"}],%s}", id[chat], kind[chat], model, choice[chat], usage);
        answer_len[chat] = with_head(answer[chat], sizeof answer[chat], body);
        print_into(body, sizeof body,
                   "data: {\"id\":\"%s\",\"object\":\"%s%s\",\"created\":1,\"model\":\"%s\",\"choices\":[{\"index\":0,%s,"
                   "\"finish_reason\":null}]}\n\n", id[chat], kind[chat], chat ? ".chunk" : "", model, delta[chat]);
        event_len[chat] = chunked(event[chat], sizeof event[chat], body, "");
        print_into(body, sizeof body,
                   "data: {\"id\":\"%s\",\"object\":\"%s%s\",\"created\":1,\"model\":\"%s\",\"choices\":[{\"index\":0,%s,"
                   "\"finish_reason\":\"length\"}],%s}\n\ndata: [DONE]\n\n",
                   id[chat], kind[chat], chat ? ".chunk" : "", model, delta[chat], usage);
        last_len[chat] = chunked(last[chat], sizeof last[chat], body, "0\r\n\r\n");
    }
    print_into(body, sizeof body,
               "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1,\"owned_by\":\"vllm\","
               "\"max_model_len\":131072}]}", model);
    models_len = with_head(models_answer, sizeof models_answer, body);
    head_len = print_into(head, sizeof head,
                          "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                          "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n");
}

static int listen_on(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 4096)) die("listen");
    return fd;
}

static void stop(int number) {
    (void)number;
    is_stopped = 1;
}

int main(int argc, char **argv) {
    int listeners[MAX_PORTS], ports = 0;
    double seconds = 3600;
    struct rlimit files;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *flag = argv[i], *value = argv[i + 1];
        if (!strcmp(flag, "--port") && ports < MAX_PORTS) listeners[ports++] = listen_on(atoi(value));
        else if (!strcmp(flag, "--events")) events_a_stream = atol(value);
        else if (!strcmp(flag, "--pace-ms")) pace_ns = (uint64_t)(atof(value) * 1e6);
        else if (!strcmp(flag, "--model")) model = value;
        else if (!strcmp(flag, "--prompt-tokens")) prompt_tokens = atol(value);
        else if (!strcmp(flag, "--seconds")) seconds = atof(value);
        else ports = 0, i = argc;
    }
    if (!ports || argc % 2 == 0) {
        fprintf(stderr, "usage: worker --port P [--port P]... [--events N] [--pace-ms X] [--model NAME] [--prompt-tokens N]"
                        " [--seconds S]\n");
        return 2;
    }
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    struct sigaction on_stop = {.sa_handler = stop};
    sigaction(SIGTERM, &on_stop, NULL);
    sigaction(SIGINT, &on_stop, NULL);
    make_answers();
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0 || (timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) < 0) die("start");
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = &timer_fd};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &e)) die("epoll_ctl");
    for (int i = 0; i < ports; i++) {
        e.data.ptr = &listeners[i];
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listeners[i], &e)) die("epoll_ctl");
    }
    uint64_t end = now_ns() + (uint64_t)(seconds * 1e9);
    while (!is_stopped && now_ns() < end) {
        struct epoll_event ready[EVENT_BATCH];
        int count = epoll_wait(epoll_fd, ready, EVENT_BATCH, 1000), is_due = 0;
        if (count < 0 && errno != EINTR) die("epoll_wait");
        for (int i = 0; i < count; i++) {
            void *whose = ready[i].data.ptr;   /* the timer after the rest: it may drop a connection of this batch */
            if (whose == &timer_fd) is_due = 1;
            else if (whose >= (void *)listeners && whose < (void *)(listeners + ports))
                take(*(int *)whose, pace_ns * (uint64_t)((int *)whose - listeners) / (uint64_t)ports);
            else serve_connection(whose, ready[i].events);
        }
        uint64_t expirations;
        if (is_due && read(timer_fd, &expirations, sizeof expirations) < 0 && errno != EAGAIN) die("timerfd");
        if (is_due) armed = 0;
        send_due();
        arm();
    }
    return 0;
}
