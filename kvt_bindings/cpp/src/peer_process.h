// Which process a peer is: what it says of itself, and how that is checked.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "kvt/data_protocol.h"

namespace kvt {

// Fills pid, start time and the address of a secret in this process's memory, made once.
// False if /proc does not tell the start time.
bool describe_own_process(wire::Hello* hello);

// Another process of this host, held by a pidfd so that its number cannot come to mean another one
// unnoticed.
class PeerProcess {
 public:
  PeerProcess() = default;
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  // Opens the pidfd, compares the start time, and reads the secret with process_vm_readv: proof of
  // permission and that the memory is that of whoever wrote the greeting. False with the reason.
  bool open(const wire::Hello& hello, std::string* why);

  // The process has not ended. Asked after a read, it says that the read was from that process.
  bool is_alive() const;
  int pid() const { return pid_; }

 private:
  int pidfd_ = -1;
  int pid_ = 0;
};

}  // namespace kvt
