// SPDX-License-Identifier: BSD-3-Clause
/// MPI 4: the library takes 64-bit counts.
#pragma once

#include <mpi.h>

#include "backends/mpi/plugin/counted.h"

namespace muster::mpi::counted {

inline constexpr bool kLarge = true;
using Ints = std::vector<int>;

static_assert(sizeof(MPI_Count) == sizeof(Count) && sizeof(MPI_Aint) == sizeof(Count));
inline const MPI_Count* counts_of(const CountedParts& parts) {
  return reinterpret_cast<const MPI_Count*>(parts.counts);
}
inline const MPI_Aint* places_of(const CountedParts& parts) {
  return reinterpret_cast<const MPI_Aint*>(parts.places);
}

inline Count bytes_of(const MPI_Status& status, int&) {
  MPI_Count count = 0;
  return MPI_Get_count_c(&status, MPI_BYTE, &count) == MPI_SUCCESS ? count : 0;
}
inline int broadcast(void* data, Count count, MPI_Datatype type, int root, MPI_Comm comm,
                     MPI_Request* request) {
  return MPI_Ibcast_c(data, count, type, root, comm, request);
}
inline int all_reduce(const void* in, void* out, Count count, MPI_Datatype type, MPI_Op op,
                      MPI_Comm comm, MPI_Request* request) {
  return MPI_Iallreduce_c(in, out, count, type, op, comm, request);
}
inline int reduce(const void* in, void* out, Count count, MPI_Datatype type, MPI_Op op, int root,
                  MPI_Comm comm, MPI_Request* request) {
  return MPI_Ireduce_c(in, out, count, type, op, root, comm, request);
}
inline int all_gather(const void* in, void* out, Count each, MPI_Datatype type, MPI_Comm comm,
                      MPI_Request* request) {
  return MPI_Iallgather_c(in, each, type, out, each, type, comm, request);
}
inline int gather(const void* in, void* out, Count each, MPI_Datatype type, int root, MPI_Comm comm,
                  MPI_Request* request) {
  return MPI_Igather_c(in, each, type, out, each, type, root, comm, request);
}
inline int scatter(const void* in, void* out, Count each, MPI_Datatype type, int root,
                   MPI_Comm comm, MPI_Request* request) {
  return MPI_Iscatter_c(in, each, type, out, each, type, root, comm, request);
}
inline int reduce_scatter(const void* in, void* out, Count each, MPI_Datatype type, MPI_Op op,
                          MPI_Comm comm, MPI_Request* request) {
  return MPI_Ireduce_scatter_block_c(in, out, each, type, op, comm, request);
}
inline int reduce_scatter_uneven(const void* in, void* out, const CountedParts& parts,
                                 MPI_Datatype type, MPI_Op op, MPI_Comm comm, Ints&,
                                 MPI_Request* request) {
  return MPI_Ireduce_scatter_c(in, out, counts_of(parts), type, op, comm, request);
}
inline int all_to_all_uneven(const void* in, const CountedParts& sent, void* out,
                             const CountedParts& received, MPI_Datatype type, MPI_Comm comm, Ints&,
                             MPI_Request* request) {
  return MPI_Ialltoallv_c(in, counts_of(sent), places_of(sent), type, out, counts_of(received),
                          places_of(received), type, comm, request);
}
inline int send(const void* data, Count bytes, int member, int tag, MPI_Comm comm,
                MPI_Request* request) {
  return MPI_Isend_c(data, bytes, MPI_BYTE, member, tag, comm, request);
}
inline int receive(void* data, Count bytes, int member, int tag, MPI_Comm comm,
                   MPI_Request* request) {
  return MPI_Irecv_c(data, bytes, MPI_BYTE, member, tag, comm, request);
}

}  // namespace muster::mpi::counted
