#include "peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace kvt {
namespace {

// Field 22 of /proc/pid/stat: when the process started, in clock ticks since boot. The fields
// before it are counted from behind the name, which may contain anything.
bool read_start_time(int pid, std::uint64_t* ticks) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char text[1024];
  const ssize_t n = read(fd, text, sizeof text - 1);
  ::close(fd);
  if (n <= 0) return false;
  text[n] = 0;
  const char* at = std::strrchr(text, ')');
  if (at == nullptr) return false;
  for (int field = 2; field < 22 && at != nullptr; ++field) at = std::strchr(at + 1, ' ');
  if (at == nullptr) return false;
  *ticks = std::strtoull(at + 1, nullptr, 10);
  return true;
}

using Nonce = std::array<std::uint8_t, wire::kNonceBytes>;

const Nonce& own_nonce() {
  static const Nonce nonce = [] {
    Nonce made{};
    std::size_t have = 0;
    while (have < made.size()) {
      const ssize_t n = getrandom(made.data() + have, made.size() - have, 0);
      if (n > 0) have += static_cast<std::size_t>(n);
    }
    return made;
  }();
  return nonce;
}

}  // namespace

bool describe_own_process(wire::Hello* hello) {
  hello->pid = static_cast<std::uint32_t>(getpid());
  hello->nonce = own_nonce();
  hello->nonce_address = reinterpret_cast<std::uint64_t>(own_nonce().data());
  return read_start_time(getpid(), &hello->start_time_ticks);
}

PeerProcess::~PeerProcess() {
  if (pidfd_ >= 0) ::close(pidfd_);
}

bool PeerProcess::open(const wire::Hello& hello, std::string* why) {
  pid_ = static_cast<int>(hello.pid);
  const auto fail = [&](const std::string& what) {
    *why = "cma: process " + std::to_string(pid_) + ": " + what;
    return false;
  };
  if (pid_ <= 0) return fail("no such number");
  pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  if (pidfd_ < 0) return fail(std::string("pidfd_open: ") + std::strerror(errno));
  std::uint64_t ticks = 0;
  if (!read_start_time(pid_, &ticks)) return fail("start time unknown");
  if (ticks != hello.start_time_ticks) return fail("another process has this number here");
  Nonce seen{};
  iovec local{seen.data(), seen.size()};
  iovec remote{reinterpret_cast<void*>(hello.nonce_address), seen.size()};
  const ssize_t n = process_vm_readv(pid_, &local, 1, &remote, 1, 0);
  if (n < 0) return fail(std::string("process_vm_readv: ") + std::strerror(errno));
  if (static_cast<std::size_t>(n) != seen.size() || seen != hello.nonce) {
    return fail("its memory does not hold the agreed secret");
  }
  if (!is_alive()) return fail("has ended");
  return true;
}

bool PeerProcess::is_alive() const {
  pollfd ended{pidfd_, POLLIN, 0};
  return poll(&ended, 1, 0) == 0;
}

}  // namespace kvt
