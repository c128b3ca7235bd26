// SPDX-License-Identifier: BSD-3-Clause
/// MPI 3: counts are ints, and larger ones are refused.
#pragma once

#include <mpi.h>

#include <climits>

#include "backends/mpi/plugin/counted.h"

namespace muster::mpi::counted {

inline constexpr bool kLarge = false;
using Ints = std::vector<int>;

inline bool fits(Count count) { return count <= INT_MAX; }
/// Whether everything up to the end of the last part can be addressed.
inline bool fits(const CountedParts& parts) {
  Count end = 0;
  for (int i = 0; i < parts.size; ++i) end += parts.counts[i];
  return fits(end);
}
inline void append(Ints& ints, const Count* values, int size) {
  for (int i = 0; values != nullptr && i < size; ++i) ints.push_back(static_cast<int>(values[i]));
}

inline Count bytes_of(const MPI_Status& status, int& count) {
  return MPI_Get_count(&status, MPI_BYTE, &count) == MPI_SUCCESS ? count : 0;
}
inline int broadcast(void* data, Count count, MPI_Datatype type, int root, MPI_Comm comm,
                     MPI_Request* request) {
  return fits(count) ? MPI_Ibcast(data, static_cast<int>(count), type, root, comm, request)
                     : kCountTooLarge;
}
inline int all_reduce(const void* in, void* out, Count count, MPI_Datatype type, MPI_Op op,
                      MPI_Comm comm, MPI_Request* request) {
  return fits(count) ? MPI_Iallreduce(in, out, static_cast<int>(count), type, op, comm, request)
                     : kCountTooLarge;
}
inline int reduce(const void* in, void* out, Count count, MPI_Datatype type, MPI_Op op, int root,
                  MPI_Comm comm, MPI_Request* request) {
  return fits(count) ? MPI_Ireduce(in, out, static_cast<int>(count), type, op, root, comm, request)
                     : kCountTooLarge;
}
inline int all_gather(const void* in, void* out, Count each, MPI_Datatype type, MPI_Comm comm,
                      MPI_Request* request) {
  const int n = static_cast<int>(each);
  return fits(each) ? MPI_Iallgather(in, n, type, out, n, type, comm, request) : kCountTooLarge;
}
inline int gather(const void* in, void* out, Count each, MPI_Datatype type, int root, MPI_Comm comm,
                  MPI_Request* request) {
  const int n = static_cast<int>(each);
  return fits(each) ? MPI_Igather(in, n, type, out, n, type, root, comm, request) : kCountTooLarge;
}
inline int scatter(const void* in, void* out, Count each, MPI_Datatype type, int root,
                   MPI_Comm comm, MPI_Request* request) {
  const int n = static_cast<int>(each);
  return fits(each) ? MPI_Iscatter(in, n, type, out, n, type, root, comm, request) : kCountTooLarge;
}
inline int reduce_scatter(const void* in, void* out, Count each, MPI_Datatype type, MPI_Op op,
                          MPI_Comm comm, MPI_Request* request) {
  const int n = static_cast<int>(each);
  return fits(each) ? MPI_Ireduce_scatter_block(in, out, n, type, op, comm, request)
                    : kCountTooLarge;
}
inline int reduce_scatter_uneven(const void* in, void* out, const CountedParts& parts,
                                 MPI_Datatype type, MPI_Op op, MPI_Comm comm, Ints& ints,
                                 MPI_Request* request) {
  if (!fits(parts)) return kCountTooLarge;
  append(ints, parts.counts, parts.size);
  return MPI_Ireduce_scatter(in, out, ints.data(), type, op, comm, request);
}
inline int all_to_all_uneven(const void* in, const CountedParts& sent, void* out,
                             const CountedParts& received, MPI_Datatype type, MPI_Comm comm,
                             Ints& ints, MPI_Request* request) {
  if (!fits(sent) || !fits(received)) return kCountTooLarge;
  append(ints, sent.counts, sent.size);
  append(ints, sent.places, sent.size);
  append(ints, received.counts, sent.size);
  append(ints, received.places, sent.size);
  const int* const lists = ints.data();
  return MPI_Ialltoallv(in, lists, lists + sent.size, type, out, lists + 2 * sent.size,
                        lists + 3 * sent.size, type, comm, request);
}
inline int send(const void* data, Count bytes, int member, int tag, MPI_Comm comm,
                MPI_Request* request) {
  return fits(bytes)
             ? MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, member, tag, comm, request)
             : kCountTooLarge;
}
inline int receive(void* data, Count bytes, int member, int tag, MPI_Comm comm,
                   MPI_Request* request) {
  return fits(bytes)
             ? MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, member, tag, comm, request)
             : kCountTooLarge;
}

}  // namespace muster::mpi::counted
