// The plan of csrc/cuda as a CPU finds it: every split of every thread block, for a test to hold against the batch.
#include "verify/scheduler.cuh"

namespace nwor {
namespace {

constexpr int kNumbers = 12;
// Entries of plan memory: four thread blocks on each of an H200's multiprocessors.
constexpr int kEntries = 132 * 4;

struct Output {
  int* numbers;  // kNumbers for each split
  int count, room;

  void add(int block, const Scheduler& scheduler, const Split& s) {
    const int row[] = {block,       scheduler.worker, scheduler.plan.cluster, s.request,      s.head,         s.first_row,
                       s.row_count, s.tile,           s.end,                  s.first_worker, s.worker_count, s.window_begin};
    static_assert(sizeof(row) == kNumbers * sizeof(int));
    if (count < room) std::memcpy(numbers + kNumbers * count, row, sizeof(row));
    ++count;
  }
};

// One for all launches, whatever their shape.
std::vector<PlanEntry>& plan_memory() {
  static std::vector<PlanEntry> memory(kEntries);
  return memory;
}

template <int kRows, int kTile>
void emulate(VerifyParams p, int planned, int threads, Output& output) {
  const int blocks = p.clusters * p.cluster;
  const bool many = p.batch * p.num_kv_heads > blocks;  // as a launch chooses its kernel
  std::vector<PlanEntry>& plan = plan_memory();
  if (planned == 1) {
    for (int i = 0; i < kEntries / 4; ++i)
      emulation::run(static_cast<unsigned>(i), 128, [&] { plan_kernel<kRows, kTile>(p, plan.data()); });
  }
  if (planned) p.plan = plan.data();
  for (int i = 0; i < blocks; ++i) {
    static int2 table[kTabledRequests];
    static Control control;
    static SortedRequests sorted;
    std::memset(&control, 0xff, sizeof(control));
    std::memset(&sorted, 0xff, sizeof(sorted));
    std::memset(table, 0xff, sizeof(table));
    emulation::run(static_cast<unsigned>(i), static_cast<unsigned>(threads), [&] {
      const Requests<kRows, kTile> requests{p, table};
      begin_schedule(p, requests, control, sorted);
      if (!control.more) return;
      const ScheduleAhead<kRows, kTile> ahead(p, requests, control);
      ahead.keep();
      __syncthreads();
      if (threadIdx.x != 0) return;
      for (int turn = 0;; turn ^= 1) {
        output.add(i, control.scheduler, control.splits[turn]);
        if (many) {
          advance_schedule<true>(p, requests, control.splits[turn], control.splits[turn ^ 1], control);
        } else {
          advance_schedule<false>(p, requests, control.splits[turn], control.splits[turn ^ 1], control);
        }
        if (!control.more) return;
      }
    });
  }
}

}  // namespace
}  // namespace nwor

// Writes up to `room` splits of 12 numbers each (see Output); returns how many there are, -1 for a shape that is not here.
// `planned`: 0 for no plan, 1 for one that is written first, 2 for what the last call wrote.
extern "C" int emulate_plan(int rows, int tile, const int* query_start_loc, const int* seq_lens, int batch, int kv_heads,
                            int group, int clusters, int cluster, int sliding_window, int planned, int threads,
                            int* numbers, int room) {
  nwor::VerifyParams p{};
  p.query_start_loc = query_start_loc;
  p.seq_lens = seq_lens;
  p.batch = batch;
  p.num_kv_heads = kv_heads;
  p.group = nwor::Divisor(static_cast<uint32_t>(group));
  p.clusters = clusters;
  p.cluster = cluster;
  p.by_blocks = nwor::Divisor(static_cast<uint32_t>(clusters * cluster));
  p.sliding_window = sliding_window;
  p.cluster_combine = 3;
  p.worker_combine = 8;
  p.split_combine = 6;
  p.plan_key = static_cast<uint32_t>((((rows * 128 + tile) * 1024 + batch) * 64 + kv_heads) * 1024 + clusters) | 1u;
  nwor::Output output{numbers, 0, room};
  if (rows == 24 && tile == 16) {
    nwor::emulate<24, 16>(p, planned, threads, output);
  } else if (rows == 40 && tile == 64) {
    nwor::emulate<40, 64>(p, planned, threads, output);
  } else if (rows == 72 && tile == 64) {
    nwor::emulate<72, 64>(p, planned, threads, output);
  } else {
    return -1;
  }
  return output.count;
}
