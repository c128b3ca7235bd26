/// What this host is called.
#pragma once

#include <string>

namespace muster {

/// As the kernel has it: "node1"; "localhost" where it has none.
std::string host_name();
/// With its domain where the resolver knows one: "node1.example.org". May ask the name service.
std::string full_host_name();
/// `name` in the domain of this host: "train-0" is "train-0.train.ns.svc.cluster.local" on a host
/// that is called "train-3.train.ns.svc.cluster.local".
std::string in_own_domain(const std::string& name);

}  // namespace muster
