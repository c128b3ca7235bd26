// SPDX-License-Identifier: BSD-3-Clause
/// The part of the MPI-5 ABI (MPI 5.0, chapter "Application Binary Interface") that muster uses, so
/// that the plugin for it compiles without any MPI. Names, values and signatures are the
/// standard's.
#pragma once

#include <stdint.h>

extern "C" {

#define MPI_VERSION 5  // read by #if, as in every mpi.h

typedef intptr_t MPI_Aint;
typedef int64_t MPI_Count;
typedef struct MPI_ABI_Op* MPI_Op;
typedef struct MPI_ABI_Comm* MPI_Comm;
typedef struct MPI_ABI_Group* MPI_Group;
typedef struct MPI_ABI_Errhandler* MPI_Errhandler;
typedef struct MPI_ABI_Request* MPI_Request;
typedef struct MPI_ABI_Datatype* MPI_Datatype;
typedef struct {
  int MPI_SOURCE;
  int MPI_TAG;
  int MPI_ERROR;
  int MPI_internal[5];
} MPI_Status;
typedef void(MPI_User_function)(void* in, void* in_out, int* count, MPI_Datatype* type);

#define MPI_OP_NULL ((MPI_Op)0x20)
#define MPI_SUM ((MPI_Op)0x21)
#define MPI_MIN ((MPI_Op)0x22)
#define MPI_MAX ((MPI_Op)0x23)
#define MPI_PROD ((MPI_Op)0x24)
#define MPI_BAND ((MPI_Op)0x28)
#define MPI_BOR ((MPI_Op)0x29)
#define MPI_BXOR ((MPI_Op)0x2a)
#define MPI_COMM_NULL ((MPI_Comm)0x100)
#define MPI_COMM_WORLD ((MPI_Comm)0x101)
#define MPI_GROUP_NULL ((MPI_Group)0x108)
#define MPI_ERRORS_RETURN ((MPI_Errhandler)0x143)
#define MPI_REQUEST_NULL ((MPI_Request)0x180)
#define MPI_INT ((MPI_Datatype)0x209)
#define MPI_FLOAT ((MPI_Datatype)0x210)
#define MPI_DOUBLE ((MPI_Datatype)0x214)
#define MPI_INT8_T ((MPI_Datatype)0x240)
#define MPI_UINT8_T ((MPI_Datatype)0x241)
#define MPI_INT16_T ((MPI_Datatype)0x248)
#define MPI_UINT16_T ((MPI_Datatype)0x249)
#define MPI_INT32_T ((MPI_Datatype)0x250)
#define MPI_UINT32_T ((MPI_Datatype)0x251)
#define MPI_INT64_T ((MPI_Datatype)0x258)
#define MPI_UINT64_T ((MPI_Datatype)0x259)
#define MPI_BYTE ((MPI_Datatype)0x247)
#define MPI_IN_PLACE ((void*)1)

enum {
  MPI_SUCCESS = 0,
  MPI_ANY_SOURCE = -1,
  MPI_THREAD_SINGLE = 0,
  MPI_THREAD_FUNNELED = 1024,
  MPI_THREAD_SERIALIZED = 2048,
  MPI_THREAD_MULTIPLE = 4096,
  MPI_TAG_UB = 501,
  MPI_MAX_ERROR_STRING = 512,
  MPI_MAX_LIBRARY_VERSION_STRING = 8192,
};

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided);
int MPI_Initialized(int* flag);
int MPI_Query_thread(int* provided);
int MPI_Finalize(void);
int MPI_Finalized(int* flag);
int MPI_Get_library_version(char* version, int* length);
int MPI_Error_string(int code, char* string, int* length);
int MPI_Comm_rank(MPI_Comm comm, int* rank);
int MPI_Comm_size(MPI_Comm comm, int* size);
int MPI_Comm_get_attr(MPI_Comm comm, int key, void* value, int* flag);
int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler);
int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* made);
int MPI_Comm_group(MPI_Comm comm, MPI_Group* group);
int MPI_Comm_create_group(MPI_Comm comm, MPI_Group group, int tag, MPI_Comm* made);
int MPI_Comm_free(MPI_Comm* comm);
int MPI_Group_incl(MPI_Group group, int n, const int ranks[], MPI_Group* made);
int MPI_Group_free(MPI_Group* group);
int MPI_Allgather(const void* in, int in_count, MPI_Datatype in_type, void* out, int out_count,
                  MPI_Datatype out_type, MPI_Comm comm);
int MPI_Allgatherv(const void* in, int in_count, MPI_Datatype in_type, void* out,
                   const int out_counts[], const int places[], MPI_Datatype out_type,
                   MPI_Comm comm);
int MPI_Op_create(MPI_User_function* user_fn, int commute, MPI_Op* op);
int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status);
int MPI_Test_cancelled(const MPI_Status* status, int* flag);
int MPI_Cancel(MPI_Request* request);
int MPI_Get_count_c(const MPI_Status* status, MPI_Datatype type, MPI_Count* count);
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request);
int MPI_Ibcast_c(void* data, MPI_Count count, MPI_Datatype type, int root, MPI_Comm comm,
                 MPI_Request* request);
int MPI_Iallreduce_c(const void* in, void* out, MPI_Count count, MPI_Datatype type, MPI_Op op,
                     MPI_Comm comm, MPI_Request* request);
int MPI_Ireduce_c(const void* in, void* out, MPI_Count count, MPI_Datatype type, MPI_Op op,
                  int root, MPI_Comm comm, MPI_Request* request);
int MPI_Iallgather_c(const void* in, MPI_Count in_count, MPI_Datatype in_type, void* out,
                     MPI_Count out_count, MPI_Datatype out_type, MPI_Comm comm,
                     MPI_Request* request);
int MPI_Igather_c(const void* in, MPI_Count in_count, MPI_Datatype in_type, void* out,
                  MPI_Count out_count, MPI_Datatype out_type, int root, MPI_Comm comm,
                  MPI_Request* request);
int MPI_Iscatter_c(const void* in, MPI_Count in_count, MPI_Datatype in_type, void* out,
                   MPI_Count out_count, MPI_Datatype out_type, int root, MPI_Comm comm,
                   MPI_Request* request);
int MPI_Ireduce_scatter_block_c(const void* in, void* out, MPI_Count out_count, MPI_Datatype type,
                                MPI_Op op, MPI_Comm comm, MPI_Request* request);
int MPI_Ireduce_scatter_c(const void* in, void* out, const MPI_Count out_counts[],
                          MPI_Datatype type, MPI_Op op, MPI_Comm comm, MPI_Request* request);
int MPI_Ialltoall_c(const void* in, MPI_Count in_count, MPI_Datatype in_type, void* out,
                    MPI_Count out_count, MPI_Datatype out_type, MPI_Comm comm,
                    MPI_Request* request);
int MPI_Ialltoallv_c(const void* in, const MPI_Count in_counts[], const MPI_Aint in_places[],
                     MPI_Datatype in_type, void* out, const MPI_Count out_counts[],
                     const MPI_Aint out_places[], MPI_Datatype out_type, MPI_Comm comm,
                     MPI_Request* request);
int MPI_Isend_c(const void* data, MPI_Count count, MPI_Datatype type, int dest, int tag,
                MPI_Comm comm, MPI_Request* request);
int MPI_Irecv_c(void* data, MPI_Count count, MPI_Datatype type, int source, int tag, MPI_Comm comm,
                MPI_Request* request);
}
