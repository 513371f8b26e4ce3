// What the machine itself can do: plain TCP, process_vm_readv and memcpy on the same pieces.
//
//   floors {tcp|cma|memcpy} PIECE_BYTES NUM_PIECES MIN_SECONDS
//
// Both sides hold NUM_PIECES pieces in their own random order, as a block pool does. tcp gathers
// with sendmsg and scatters with readv, cma lets the receiver read the sender's memory; each is two
// processes and ends with one byte back. Prints one JSON line: seconds of each repetition.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kIov = 1024;  // IOV_MAX

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::exit(1);
}

std::uint8_t* memory(std::size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) die("mmap");
  madvise(p, bytes, MADV_HUGEPAGE);  // as numpy and torch have it
  return static_cast<std::uint8_t*>(p);
}

std::vector<std::size_t> order(std::size_t n, unsigned seed) {
  std::vector<std::size_t> v(n);
  std::iota(v.begin(), v.end(), std::size_t{0});
  std::shuffle(v.begin(), v.end(), std::mt19937(seed));
  return v;
}

std::vector<iovec> pieces(std::uint8_t* base, const std::vector<std::size_t>& at,
                          std::size_t piece) {
  std::vector<iovec> v;
  for (const std::size_t i : at) v.push_back({base + i * piece, piece});
  return v;
}

// Moves everything in `all` through `call(iov, n) -> bytes`, which may be partial.
template <class Call>
void move_all(std::vector<iovec> all, Call&& call) {
  std::size_t at = 0;
  while (at < all.size()) {
    ssize_t n = call(all.data() + at, std::min(kIov, all.size() - at));
    if (n <= 0) die("transfer");
    while (n > 0) {
      const std::size_t take = std::min<std::size_t>(static_cast<std::size_t>(n), all[at].iov_len);
      all[at].iov_base = static_cast<char*>(all[at].iov_base) + take;
      all[at].iov_len -= take;
      n -= static_cast<ssize_t>(take);
      if (all[at].iov_len == 0) ++at;
    }
  }
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Once>
void repeat(double min_seconds, Once&& once) {
  once();  // faults pages in
  std::string out;
  const double start = now();
  int n = 0;
  do {
    const double t = now();
    once();
    char text[32];
    std::snprintf(text, sizeof text, "%s%.9f", n == 0 ? "" : ",", now() - t);
    out += text;
  } while (++n < 5 || (now() - start < min_seconds && n < 2000));
  std::printf("{\"seconds\":[%s]}\n", out.c_str());
}

void check(const std::uint8_t* dst, const std::vector<std::size_t>& src_at,
           const std::vector<std::size_t>& dst_at, std::size_t piece) {
  for (std::size_t i = 0; i < src_at.size(); ++i) {
    const auto want = static_cast<std::uint8_t>(src_at[i] * 37 + 11);
    const std::uint8_t* p = dst + dst_at[i] * piece;
    if (p[0] != want || p[piece - 1] != want) {
      std::fprintf(stderr, "wrong bytes in piece %zu\n", i);
      std::exit(1);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: floors {tcp|cma|memcpy} PIECE_BYTES NUM_PIECES MIN_SECONDS\n");
    return 2;
  }
  const std::string mode = argv[1];
  const std::size_t piece = std::strtoull(argv[2], nullptr, 10);
  const std::size_t num = std::strtoull(argv[3], nullptr, 10);
  const double min_seconds = std::strtod(argv[4], nullptr);
  std::uint8_t* src = memory(piece * num);
  std::uint8_t* dst = memory(piece * num);
  const auto src_at = order(num, 1);
  const auto dst_at = order(num, 2);
  const auto fill = [&] {
    for (std::size_t i = 0; i < num; ++i) {
      std::memset(src + i * piece, static_cast<int>((i * 37 + 11) & 0xff), piece);
    }
  };
  if (mode == "memcpy") {
    fill();
    repeat(min_seconds, [&] {
      for (std::size_t i = 0; i < num; ++i) {
        std::memcpy(dst + dst_at[i] * piece, src + src_at[i] * piece, piece);
      }
    });
    check(dst, src_at, dst_at, piece);
    return 0;
  }

  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    die("listen");
  }
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  const pid_t sender = getpid();
  const pid_t child = fork();
  if (child < 0) die("fork");
  const int one = 1;
  if (child == 0) {  // the receiver
    const int fd = accept(listener, nullptr, nullptr);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    const auto to = pieces(dst, dst_at, piece);
    const auto from = pieces(src, src_at, piece);
    char go = 0;
    while (true) {
      if (mode == "tcp") {
        if (recv(fd, &go, 1, MSG_PEEK) <= 0) break;
        move_all(to, [&](iovec* v, std::size_t n) { return readv(fd, v, static_cast<int>(n)); });
      } else {
        if (recv(fd, &go, 1, 0) <= 0) break;
        for (std::size_t at = 0; at < num; at += kIov) {
          const std::size_t n = std::min(kIov, num - at);
          const auto want = static_cast<ssize_t>(n * piece);
          if (process_vm_readv(sender, to.data() + at, n, from.data() + at, n, 0) != want) {
            die("process_vm_readv");
          }
        }
      }
      if (send(fd, &go, 1, 0) != 1) break;
    }
    check(dst, src_at, dst_at, piece);
    return 0;
  }
  fill();  // after the fork: pages shared by two processes are slower to read
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), size) != 0) die("connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  const auto from = pieces(src, src_at, piece);
  repeat(min_seconds, [&] {
    char byte = 1;
    if (mode == "tcp") {
      move_all(from, [&](iovec* v, std::size_t n) {
        msghdr m{};
        m.msg_iov = v;
        m.msg_iovlen = n;
        return sendmsg(fd, &m, MSG_NOSIGNAL);
      });
    } else if (send(fd, &byte, 1, MSG_NOSIGNAL) != 1) {
      die("send");
    }
    if (recv(fd, &byte, 1, 0) != 1) die("recv");
  });
  close(fd);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
