/* A rank of an MPI library that muster-lab measures: reads cells from <folder>/to-<rank>,
   answers in <folder>/back; without a folder rank 0 reads standard input, which mpirun gives to no
   other rank, and answers on standard output. The orders, the answers and what is measured are
   those of src/faces/cli/bench/measurement.h. Compiled by muster-lab with the library's own
   compiler. Every rank rewrites its buffer before each call; all_reduce and broadcast are in place.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LOOPS 11
// Where one call takes many times as long as all loops were to take: their sum would be minutes.
#define FEW_LOOPS 3
#define MANY_TIMES 5
#define MOST_CALLS 200000
#define MOST_SINGLES 2000
// How long a rank sleeps that waits for rank 0's next order: another library is measured meanwhile.
#define NAP_NS 10000000L

static int rank, size;
static char *in, *out;
static size_t capacity;
static FILE *orders, *back;  // orders are NULL where rank 0 alone reads them

struct cell {
  char op[64], dtype[64], memory[64];
  unsigned long long bytes;
  double seconds, settling;
  char from[64];
  MPI_Datatype type;
  int width;
};

static long long now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int counts_from(const struct cell* cell, const char* whose) {
  return strcmp(cell->from, whose) == 0;
}

// What a call was on this rank. The latest stamps of all ranks make its span.
static void stamp_call(const struct cell* cell, long long* stamps, long long start, long long end) {
  stamps[0] = counts_from(cell, "last") ? start : counts_from(cell, "first") ? -start : 0;
  stamps[1] = counts_from(cell, "own") ? end - start : end;
}

// In microseconds.
static double span_of(const struct cell* cell, const long long* latest) {
  const long long start = counts_from(cell, "first") ? -latest[0] : latest[0];
  return (double)(latest[1] - start) / 1000;
}

static int compare_doubles(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return x < y ? -1 : x > y;
}

static int find_type(struct cell* cell) {
  static const char* names[] = {"float32", "float64", "int8", "uint8", "int16", "int32", "int64"};
  const MPI_Datatype types[] = {MPI_FLOAT,   MPI_DOUBLE,  MPI_INT8_T, MPI_UINT8_T,
                                MPI_INT16_T, MPI_INT32_T, MPI_INT64_T};
  for (size_t i = 0; i < sizeof types / sizeof *types; ++i) {
    if (strcmp(cell->dtype, names[i]) != 0) continue;
    cell->type = types[i];
    MPI_Type_size(cell->type, &cell->width);
    return 1;
  }
  return 0;
}

/* 0 where there is no such operation. */
static int call(const struct cell* cell) {
  const int all = (int)(cell->bytes / cell->width), slice = (int)(cell->bytes / size / cell->width);
  const char* op = cell->op;
  if (strcmp(op, "all_reduce") == 0)
    return MPI_Allreduce(MPI_IN_PLACE, in, all, cell->type, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS;
  if (strcmp(op, "broadcast") == 0)
    return MPI_Bcast(in, all, cell->type, 0, MPI_COMM_WORLD) == MPI_SUCCESS;
  if (strcmp(op, "reduce") == 0)
    return MPI_Reduce(in, out, all, cell->type, MPI_SUM, 0, MPI_COMM_WORLD) == MPI_SUCCESS;
  if (strcmp(op, "all_gather") == 0)
    return MPI_Allgather(in, slice, cell->type, out, slice, cell->type, MPI_COMM_WORLD) ==
           MPI_SUCCESS;
  if (strcmp(op, "gather") == 0)
    return MPI_Gather(in, slice, cell->type, out, slice, cell->type, 0, MPI_COMM_WORLD) ==
           MPI_SUCCESS;
  if (strcmp(op, "scatter") == 0)
    return MPI_Scatter(in, slice, cell->type, out, slice, cell->type, 0, MPI_COMM_WORLD) ==
           MPI_SUCCESS;
  if (strcmp(op, "reduce_scatter") == 0)
    return MPI_Reduce_scatter_block(in, out, slice, cell->type, MPI_SUM, MPI_COMM_WORLD) ==
           MPI_SUCCESS;
  if (strcmp(op, "all_to_all") == 0)
    return MPI_Alltoall(in, slice, cell->type, out, slice, cell->type, MPI_COMM_WORLD) ==
           MPI_SUCCESS;
  if (strcmp(op, "ping_pong") == 0) {
    const int other = 1 - rank;
    if (rank > 1) return 1;
    if (rank == 0) MPI_Send(in, all, cell->type, other, 0, MPI_COMM_WORLD);
    MPI_Recv(out, all, cell->type, other, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    return rank == 0 || MPI_Send(in, all, cell->type, other, 0, MPI_COMM_WORLD) == MPI_SUCCESS;
  }
  if (strcmp(op, "barrier") == 0) return MPI_Barrier(MPI_COMM_WORLD) == MPI_SUCCESS;
  return 0;
}

// The same for all ranks: a root that only gives is through long before the others.
static double loop(const struct cell* cell, long long times) {
  long long stamps[2];
  MPI_Barrier(MPI_COMM_WORLD);
  const long long start = now();
  for (long long i = 0; i < times; ++i) {
    memset(in, 1, cell->bytes);
    call(cell);
  }
  stamp_call(cell, stamps, start, now());
  MPI_Allreduce(MPI_IN_PLACE, stamps, 2, MPI_LONG_LONG, MPI_MAX, MPI_COMM_WORLD);
  return span_of(cell, stamps) / (double)times;
}

static void answer(const char* text) {
  if (rank != 0) return;
  fputs(text, back);
  fflush(back);
}

// How many calls of so many microseconds there is time for, as rank 0 has it.
static long long calls_in(double seconds, double call_us, long long least, long long most) {
  long long calls = (long long)(seconds * 1e6 / (call_us > 0.05 ? call_us : 0.05));
  if (calls < least) calls = least;
  if (calls > most) calls = most;
  MPI_Bcast(&calls, 1, MPI_LONG_LONG, 0, MPI_COMM_WORLD);
  return calls;
}

static void measure(const struct cell* cell) {
  if (cell->bytes + 64 > capacity) {
    free(in);
    free(out);
    capacity = cell->bytes + 64;
    in = aligned_alloc(64, (capacity + 63) / 64 * 64);
    out = aligned_alloc(64, (capacity + 63) / 64 * 64);
    memset(in, 0, capacity);
    memset(out, 0, capacity);
  }
  if (!call(cell)) return answer("skip MPI has no such operation\n");
  double warm = loop(cell, 1);  // may be cold
  const double second = loop(cell, 1);
  if (second < warm) warm = second;
  const int in_time = calls_in(MANY_TIMES * cell->seconds, warm, 0, 1) > 0;
  const int rounds = in_time ? LOOPS : FEW_LOOPS;
  for (int i = 0; in_time && i < 2; ++i)
    warm = loop(cell, calls_in(cell->seconds / 4, warm, 2, 20));
  for (double settled = 0; settled < cell->settling;) {
    const long long more = calls_in(cell->settling - settled, warm, 1, MOST_CALLS);
    warm = loop(cell, more);
    settled += warm * (double)more / 1e6;
  }
  const long long times = calls_in(cell->seconds / LOOPS, warm, 1, MOST_CALLS);
  double loops[LOOPS];
  for (int i = 0; i < rounds; ++i) loops[i] = loop(cell, times);
  qsort(loops, (size_t)rounds, sizeof *loops, compare_doubles);

  const long long singles = calls_in(cell->seconds / 2, warm, rounds, MOST_SINGLES);
  long long* stamps = malloc(sizeof *stamps * 2 * (size_t)singles);
  double* spans = malloc(sizeof *spans * (size_t)singles);
  for (long long i = 0; i < singles; ++i) {
    memset(in, 1, cell->bytes);
    MPI_Barrier(MPI_COMM_WORLD);
    const long long start = now();
    call(cell);
    stamp_call(cell, stamps + 2 * i, start, now());
  }
  MPI_Allreduce(MPI_IN_PLACE, stamps, (int)(2 * singles), MPI_LONG_LONG, MPI_MAX, MPI_COMM_WORLD);
  for (long long i = 0; i < singles; ++i) spans[i] = span_of(cell, stamps + 2 * i);
  qsort(spans, (size_t)singles, sizeof *spans, compare_doubles);
  char text[256];
  snprintf(text, sizeof text, "row %.4f %.4f %.4f %.4f %lld\n", loops[rounds / 2],
           spans[singles / 2], spans[0], spans[singles * 99 / 100], times * rounds + singles);
  answer(text);
  free(stamps);
  free(spans);
}

static void open_pipes(const char* folder) {
  char path[4096];
  snprintf(path, sizeof path, "%s/back", folder);
  back = fopen(path, "w");
  snprintf(path, sizeof path, "%s/to-%d", folder, rank);
  orders = fopen(path, "r");
  if (back != NULL && orders != NULL) return;
  fprintf(stderr, "there are no pipes for orders and answers in %s\n", folder);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

/* 0 at the end. */
static int next_order(char* line, int length) {
  if (orders != NULL) return fgets(line, length, orders) != NULL;
  if (rank == 0 && fgets(line, length, stdin) == NULL) line[0] = '\0';
  MPI_Request request;
  MPI_Ibcast(line, length, MPI_CHAR, 0, MPI_COMM_WORLD, &request);
  const struct timespec nap = {0, NAP_NS};
  for (int done = 0;;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done) return line[0] != '\0';
    nanosleep(&nap, NULL);
  }
}

int main(int count, char** words) {
  MPI_Init(&count, &words);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  back = stdout;
  if (count > 1) open_pipes(words[1]);
  char line[1024] = "";
  while (next_order(line, sizeof line)) {
    struct cell cell;
    if (sscanf(line, "cell %63s %llu %63s %63s %lf %lf %63s", cell.op, &cell.bytes, cell.dtype,
               cell.memory, &cell.seconds, &cell.settling, cell.from) != 7)
      break;
    if (!find_type(&cell)) {
      answer("skip the worker for MPI knows no such element type\n");
      continue;
    }
    measure(&cell);
  }
  MPI_Finalize();
  return 0;
}
