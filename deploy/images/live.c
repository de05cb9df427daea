/* The health check of the images: whether the event loop of each process that listens still runs.

   /proc ──> the process's listening sockets ──> GET /live to each ──> the first answer of each process

   The kernel lists the ports, so any --port and --admin-port are found. One port of a process is enough: a
   frontend that waits until it is ready answers on its admin listener only. A connection that the process closes
   is an answer, too: a port with TLS does so after a request without TLS. Bytes that are no HTTP are not: ZMQ
   answers from a thread of its own. `live PID`: that process only, elsewhere than in a container. Exit code 0:
   all live; 1: one is not, or nothing listens. */

#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define ANSWER_S 1 /* two ports of a process that hangs end before the 3 s of HEALTHCHECK */
#define LISTENING 0x0A
#define MOST 256 /* listening sockets; further ones are not seen */

struct listener {
    unsigned long inode;
    struct sockaddr_storage address;
    socklen_t length;
};

static struct listener listeners[MOST];
static int count;

static const char REQUEST[] = "GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

/* Where to reach a listening socket: of a wildcard address the loopback. `hex` is as /proc/net has it. */
static socklen_t address_of(const char *hex, unsigned port, struct sockaddr_storage *address)
{
    memset(address, 0, sizeof *address);
    if (strlen(hex) == 8) {
        struct sockaddr_in *v4 = (struct sockaddr_in *)address;
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        v4->sin_addr.s_addr = strtoul(hex, NULL, 16);
        if (v4->sin_addr.s_addr == INADDR_ANY)
            v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        return sizeof *v4;
    }
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)address;
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    for (int word = 0; word < 4; word++) {
        char digits[9] = {0};
        memcpy(digits, hex + 8 * word, 8);
        unsigned value = strtoul(digits, NULL, 16);
        memcpy(&v6->sin6_addr.s6_addr[4 * word], &value, 4);
    }
    if (IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr))
        v6->sin6_addr = in6addr_loopback;
    return sizeof *v6;
}

/* Whether the loop behind this address reads a request. */
static int answers(const struct sockaddr_storage *address, socklen_t length)
{
    struct timeval limit = {.tv_sec = ANSWER_S};
    char begin[5] = {0};
    int peer = socket(address->ss_family, SOCK_STREAM, 0);
    setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ssize_t got = -1;
    if (connect(peer, (const struct sockaddr *)address, length) == 0
        && send(peer, REQUEST, sizeof REQUEST - 1, MSG_NOSIGNAL) > 0)
        got = recv(peer, begin, sizeof begin, MSG_WAITALL);
    int is_closed = got == 0 || (got < 0 && errno == ECONNRESET);
    int is_alert = got > 1 && begin[0] == 0x15; /* a TLS record of this type */
    close(peer);
    return is_closed || is_alert || (got == sizeof begin && memcmp(begin, "HTTP/", sizeof begin) == 0);
}

/* Note the listening sockets of a table, which are its first lines: those of streams, maybe thousands, follow. */
static void read_listeners(const char *path)
{
    char line[512], hex[33];
    unsigned port, state;
    unsigned long inode;
    FILE *table = fopen(path, "r");
    if (!table)
        return;
    if (!fgets(line, sizeof line, table)) /* the heading */
        line[0] = 0;
    while (count < MOST && fgets(line, sizeof line, table)) {
        const char *form = " %*d: %32[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*x:%*x %*x:%*x %*x %*u %*u %lu";
        if (sscanf(line, form, hex, &port, &state, &inode) != 4 || state != LISTENING)
            break;
        struct listener *one = &listeners[count++];
        one->inode = inode;
        one->length = address_of(hex, port, &one->address);
    }
    fclose(table);
}

/* 1: the socket listens and answers; 0: it listens only; -1: it does not listen. */
static int state_of(unsigned long inode)
{
    for (int number = 0; number < count; number++)
        if (listeners[number].inode == inode)
            return answers(&listeners[number].address, listeners[number].length);
    return -1;
}

/* The same of a process: 1, as soon as one of its sockets answers. */
static int is_live(const char *pid)
{
    char path[300], link[64];
    int found = -1;
    snprintf(path, sizeof path, "/proc/%s/fd", pid);
    DIR *files = opendir(path);
    for (struct dirent *file; files && found < 1 && (file = readdir(files));) {
        unsigned long inode;
        snprintf(path, sizeof path, "/proc/%s/fd/%.20s", pid, file->d_name);
        ssize_t length = readlink(path, link, sizeof link - 1);
        if (length <= 0)
            continue;
        link[length] = 0;
        if (sscanf(link, "socket:[%lu]", &inode) == 1) {
            int state = state_of(inode);
            found = state > found ? state : found;
        }
    }
    if (files)
        closedir(files);
    return found;
}

int main(int words, char **word)
{
    int live = 0;
    read_listeners("/proc/net/tcp");
    read_listeners("/proc/net/tcp6");
    DIR *processes = opendir("/proc");
    for (struct dirent *process; processes && (process = readdir(processes));) {
        const char *pid = process->d_name;
        if (!isdigit((unsigned char)pid[0]) || (words > 1 && strcmp(pid, word[1]) != 0))
            continue;
        int state = is_live(pid);
        if (state == 0) {
            fprintf(stderr, "process %s does not answer\n", pid);
            return 1;
        }
        live += state == 1;
    }
    if (!live)
        fprintf(stderr, "no process listens\n");
    return !live;
}
