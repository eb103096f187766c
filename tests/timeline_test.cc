// What `megamoe trace` makes of the kernels' logs, on logs and timelines written by hand.
#include "trace/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "trace/chrome_json.h"
#include "trace/summary.h"

namespace megamoe::timeline {
namespace {

Role role(std::string name, std::vector<Span> spans) { return {std::move(name), std::move(spans)}; }

/// An SM with one tile of 192 rows and 10 K blocks between 20 and 80 us, epilogue until 90, results
/// stored until 95. The load warp waits for rows from 12 to 18.
Block one_tile_block() {
  Block block{3, 0.0, 96.0, 1.0, {}};
  block.roles = {
      role("load", {{Event::awaits_rows, 12, 18, 0, 0}, {Event::loads, 18, 70, 30, 0, 5, 12, 0}}),
      role("store 0", {{Event::stores, 2, 95, 88, 88, 5, 12, 0}}),
      {},
      {},
      role("math 0", {{Event::main_loop, 10, 80, 14, 10, 5, 12, 10},
                      {Event::epilogue, 80, 90, 2, 2, 5, 12, 0}}),
      {}};
  return block;
}

double share_of(const KernelSummary& summary, const std::string& role, const std::string& state) {
  for (const RoleShares& shares : summary.roles) {
    if (shares.role != role) continue;
    for (const auto& [name, share] : shares.states) {
      if (name == state) return share;
    }
  }
  return -1.0;
}

double idle_and_busy(const KernelSummary& summary) {
  return summary.main_loops + summary.start + summary.awaits_rows + summary.epilogue +
         summary.awaits_operands + summary.rows_beside + summary.tail;
}

TEST(Timeline, TimesComeFromTheAnchorsOfTheBlock) {
  const auto log = std::make_unique<trace::BlockLog[]>(2);  // the second CTA did not run
  log[0].begin_ns = 5000;
  log[0].end_ns = 9000;
  log[0].begin_clock = 0xfffffff0U;  // wraps within the kernel
  log[0].end_clock = log[0].begin_clock + 8000;
  log[0].sm = 17;
  log[0].num_records[trace::track_math_1] = 1;
  trace::Record& record = log[0].records[trace::track_math_1][0];
  record.event = Event::main_loop;
  record.begin = log[0].begin_clock + 2000;
  record.end = log[0].begin_clock + 6000;
  record.waited = 1000;
  record.first_waited = 400;
  record.group = 9;
  record.num_units = 12;
  record.num_k_blocks = 32;
  const KernelRun run = decode(device::ProductKind::down, log.get(), 2, 4000);
  ASSERT_EQ(run.blocks.size(), 1U);
  const Block& block = run.blocks[0];
  EXPECT_EQ(run.name, "down");
  EXPECT_EQ(block.sm, 17U);
  EXPECT_DOUBLE_EQ(block.begin_us, 1.0);
  EXPECT_DOUBLE_EQ(block.end_us, 5.0);
  EXPECT_DOUBLE_EQ(block.clock_ghz, 2.0);
  const Role& math = block.roles[trace::track_math_1];
  EXPECT_EQ(math.name, "math 1");
  ASSERT_EQ(math.spans.size(), 1U);
  EXPECT_DOUBLE_EQ(math.spans[0].begin_us, 2.0);
  EXPECT_DOUBLE_EQ(math.spans[0].end_us, 4.0);
  EXPECT_DOUBLE_EQ(math.spans[0].waited_us, 0.5);
  EXPECT_DOUBLE_EQ(math.spans[0].first_waited_us, 0.2);
  EXPECT_EQ(math.spans[0].group, 9);
}

TEST(Timeline, SpansBeyondTheRoomAreCounted) {
  const auto log = std::make_unique<trace::BlockLog>();
  log->begin_ns = 1;
  log->end_ns = 1001;
  log->end_clock = 1000;
  log->num_records[trace::track_warp_3] = trace::kMaxRecords + 7;
  for (trace::Record& record : log->records[trace::track_warp_3]) record.event = Event::pulls;
  const KernelRun run = decode(device::ProductKind::gate_up, log.get(), 1, 0);
  const Role& pull = run.blocks[0].roles[trace::track_warp_3];
  EXPECT_EQ(pull.name, "pull");
  EXPECT_EQ(pull.spans.size(), trace::kMaxRecords);
  EXPECT_EQ(pull.num_lost, 7);
  EXPECT_EQ(summarize(run, 0).num_lost, 7);
  EXPECT_NE(to_table({summarize(run, 0)}).find("7 spans were lost"), std::string::npos);
}

TEST(Timeline, IdleTimeIsToldApart) {
  const KernelSummary summary = summarize({"gate_up", {one_tile_block()}}, 1);
  EXPECT_EQ(summary.num_sms, 1);
  EXPECT_DOUBLE_EQ(summary.ms, 0.096);
  EXPECT_DOUBLE_EQ(summary.main_loops, 60.0 / 96);
  EXPECT_DOUBLE_EQ(summary.start, 20.0 / 96);  // before the first tile, whatever it waited for
  EXPECT_DOUBLE_EQ(summary.awaits_rows, 0.0);
  EXPECT_DOUBLE_EQ(summary.awaits_operands, 0.0);
  EXPECT_DOUBLE_EQ(summary.epilogue, 15.0 / 96);  // until the results are stored
  EXPECT_DOUBLE_EQ(summary.tail, 1.0 / 96);
  EXPECT_DOUBLE_EQ(summary.at_full_rate, 7.68 / 96);  // 64 cycles x 12 units x 10 blocks at 1 GHz
  EXPECT_NEAR(idle_and_busy(summary), 1.0, 1e-12);
  EXPECT_DOUBLE_EQ(share_of(summary, "load", "waits: a free buffer"), 30.0 / 96);
  EXPECT_DOUBLE_EQ(share_of(summary, "load", "waits: rows"), 6.0 / 96);
  EXPECT_DOUBLE_EQ(share_of(summary, "store 0", "waits: results"), 88.0 / 96);
  EXPECT_DOUBLE_EQ(share_of(summary, "math 0", "waits: operands"), 14.0 / 96);
  EXPECT_DOUBLE_EQ(share_of(summary, "math 0", "before and after"), 16.0 / 96);
}

TEST(Timeline, GapsBetweenTilesBelongToRowsThenEpilogueThenOperands) {
  Block block = one_tile_block();
  // A second tile: first products at 120; rows awaited 92 to 104, an epilogue until 90.
  block.end_us = 150.0;
  block.roles[0].spans.push_back({Event::awaits_rows, 92, 104, 0, 0});
  block.roles[1].spans.push_back({Event::stores, 95, 148, 40, 40, 6, 12, 0});
  block.roles[4].spans.push_back({Event::main_loop, 90, 140, 30, 30, 6, 12, 10});
  block.roles[4].spans.push_back({Event::epilogue, 140, 146, 0, 0, 6, 12, 0});
  const KernelSummary summary = summarize({"gate_up", {block}}, 0);
  EXPECT_DOUBLE_EQ(summary.main_loops, 80.0 / 150);
  EXPECT_DOUBLE_EQ(summary.awaits_rows, 12.0 / 150);
  EXPECT_DOUBLE_EQ(summary.epilogue, (10.0 + 8.0) / 150);
  EXPECT_DOUBLE_EQ(summary.awaits_operands, (2.0 + 16.0) / 150);
  EXPECT_DOUBLE_EQ(summary.tail, 2.0 / 150);
  EXPECT_NEAR(idle_and_busy(summary), 1.0, 1e-12);
}

TEST(Timeline, TwoWarpgroupsKeepOneAnothersTensorCoresBusy) {
  Block block = one_tile_block();
  block.roles[5] = role("math 1", {{Event::main_loop, 75, 95, 0, 0, 5, 12, 3}});
  const KernelSummary summary = summarize({"p", {block}}, 0);
  EXPECT_DOUBLE_EQ(summary.main_loops, 75.0 / 96);
  EXPECT_DOUBLE_EQ(summary.epilogue, 0.0);  // the other one multiplied meanwhile
}

TEST(Timeline, ABlockThatEndsEarlyHasATail) {
  Block late = one_tile_block();
  late.sm = 4;
  for (Role& late_role : late.roles) {
    for (Span& span : late_role.spans) {
      span.begin_us += 104;
      span.end_us += 104;
    }
  }
  late.end_us = 200.0;
  const KernelSummary summary = summarize({"down", {one_tile_block(), late}}, 0);
  EXPECT_DOUBLE_EQ(summary.tail, (105.0 + 1.0) / 400);
  EXPECT_DOUBLE_EQ(summary.start, (20.0 + 124.0) / 400);
  EXPECT_NEAR(idle_and_busy(summary), 1.0, 1e-12);
}

TEST(Timeline, PulledRowsOfLaterKernelsAreNoTile) {
  Block block = one_tile_block();
  block.end_us = 120.0;
  block.roles[3] = role("pull", {{Event::pulls, 2, 119, 0, 0}});
  const KernelSummary summary = summarize({"p", {block}}, 0);
  EXPECT_DOUBLE_EQ(summary.rows_beside, 24.0 / 120);
  EXPECT_DOUBLE_EQ(summary.tail, 1.0 / 120);
  EXPECT_NEAR(idle_and_busy(summary), 1.0, 1e-12);
}

TEST(Timeline, RowsPulledAndSummedBesideWeightGradients) {
  const auto log = std::make_unique<trace::BlockLog>();
  log->begin_ns = 1000;
  log->end_ns = 101000;
  log->end_clock = 100000;
  const auto record = [&](int track, Event event, std::uint32_t begin, std::uint32_t end,
                          std::uint32_t waited) {
    log->records[track][log->num_records[track]++] = {begin, end, waited, 0, 0, 0, 0, event, 0};
  };
  record(trace::track_warp_3, Event::pulls, 1000, 5000, 0);
  record(trace::track_warp_3, Event::awaits_copies, 5000, 6000, 0);
  record(trace::track_warp_3, Event::awaits_gradients, 6000, 10000, 0);
  record(trace::track_warp_3, Event::reduces, 10000, 96000, 80000);
  record(trace::track_math_0, Event::main_loop, 2000, 90000, 0);
  const KernelRun run = decode(device::ProductKind::weight_gradients, log.get(), 1, 1000);
  const KernelSummary summary = summarize(run, 0);
  const std::string role = "pull, reduce";
  EXPECT_EQ(run.blocks[0].roles[trace::track_warp_3].name, role);
  EXPECT_DOUBLE_EQ(share_of(summary, role, "pulls"), 0.04);
  EXPECT_DOUBLE_EQ(share_of(summary, role, "waits: peers' dx"), 0.04);
  EXPECT_DOUBLE_EQ(share_of(summary, role, "sums dx"), 0.06);
  EXPECT_DOUBLE_EQ(share_of(summary, role, "waits: slots"), 0.80);
  EXPECT_NEAR(summary.rows_beside, 0.06, 1e-12);
  EXPECT_NEAR(summary.tail, 0.04, 1e-12);
  EXPECT_NEAR(idle_and_busy(summary), 1.0, 1e-12);
}

TEST(Timeline, AKernelWithoutBlocksOrTilesHasASummary) {
  EXPECT_EQ(summarize({"dx", {}}, 0).num_sms, 0);
  Block block{0, 5.0, 15.0, 1.0, {}};
  block.roles.resize(trace::kNumTracks);
  const KernelSummary summary = summarize({"dx", {block}}, 0);
  EXPECT_DOUBLE_EQ(summary.start, 1.0);
  EXPECT_NEAR(idle_and_busy(summary), 1.0, 1e-12);
}

TEST(Timeline, HowMuchTravelledUnderAnothersWeightGradients) {
  GpuTimeline mine{0, {}, {{"dx", {one_tile_block()}}, {"weight_gradients", {}}}};
  Block gradients{0, 30.0, 60.0, 1.0, {}};
  mine.kernels[1].blocks.push_back(gradients);
  GpuTimeline other = mine;
  other.rank = 1;
  other.kernels[0].blocks[0].roles[1] = role("push 0", {{Event::pushes, 0, 40, 0, 0}});
  EXPECT_DOUBLE_EQ(share_under_weight_gradients({mine, other}, 0), 0.25);
  EXPECT_DOUBLE_EQ(share_under_weight_gradients({mine, other}, 1), 0.0);  // nobody else pushes
}

TEST(ChromeJson, AProcessAGpuAndAThreadARole) {
  GpuTimeline gpu{1, {{"gate_up", 0.0, 100.0}}, {{"gate_up", {one_tile_block()}}}};
  const nlohmann::ordered_json json = to_chrome_json({gpu}, 0);
  const auto& events = json.at("traceEvents");
  const auto find = [&](const std::string& phase, const std::string& name) {
    return std::find_if(events.begin(), events.end(), [&](const auto& event) {
      return event.at("ph") == phase && event.at("name") == name;
    });
  };
  for (const auto& event : events) EXPECT_EQ(event.at("pid"), 1);
  const auto main_loop = find("X", "main loop");
  ASSERT_NE(main_loop, events.end());
  EXPECT_EQ(main_loop->at("ts"), 20.0);
  EXPECT_EQ(main_loop->at("dur"), 60.0);
  EXPECT_EQ(main_loop->at("cat"), "gate_up");
  EXPECT_EQ(main_loop->at("args").at("expert"), 5);
  EXPECT_EQ(main_loop->at("args").at("rows"), 192);
  EXPECT_EQ(main_loop->at("args").at("waited_us"), 4.0);
  const auto operands = find("X", "awaits operands");
  ASSERT_NE(operands, events.end());
  EXPECT_EQ(operands->at("dur"), 10.0);
  EXPECT_EQ(operands->at("tid"), main_loop->at("tid"));
  const auto named = std::find_if(events.begin(), events.end(), [&](const auto& event) {
    return event.at("name") == "thread_name" && event.at("tid") == main_loop->at("tid");
  });
  ASSERT_NE(named, events.end());
  EXPECT_EQ(named->at("args").at("name"), "SM 003 math 0");
}

TEST(ChromeJson, SomeSmsSpreadOverTheGpu) {
  GpuTimeline gpu{0, {}, {{"down", {}}}};
  for (std::uint32_t sm = 0; sm < 12; ++sm) {
    gpu.kernels[0].blocks.push_back(one_tile_block());
    gpu.kernels[0].blocks.back().sm = sm;
  }
  const auto count = [&](int num_sms) {
    const nlohmann::ordered_json json = to_chrome_json({gpu}, num_sms);
    std::string sms;
    for (const auto& event : json.at("traceEvents")) {
      if (event.at("name") != "thread_name") continue;
      const std::string name = event.at("args").at("name");
      if (name.ends_with("kernel")) sms += name.substr(3, 4);
    }
    return sms;
  };
  EXPECT_EQ(count(3), "000 004 008 ");
  EXPECT_EQ(count(0).size(), 12U * 4);
  EXPECT_EQ(count(50).size(), 12U * 4);
}

TEST(ChromeJson, TheSummaryAsJson) {
  const auto json = to_json({summarize({"gate_up", {one_tile_block()}}, 1)});
  EXPECT_EQ(json.at(0).at("kernel"), "gate_up");
  EXPECT_EQ(json.at(0).at("rank"), 1);
  EXPECT_DOUBLE_EQ(json.at(0).at("roles").at("load").at("waits: rows"), 6.0 / 96);
}

}  // namespace
}  // namespace megamoe::timeline
