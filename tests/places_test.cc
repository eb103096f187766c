// Which options and which places of ranks are taken, and in what words others are refused. Needs
// no device: places are given.
#include "comm/cuda/places.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/cuda/reach.h"

namespace megamoe::cuda {
namespace {

Error error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::internal, "no error"};
}

void expect(const Error& error, ErrorCode code, const std::string& text) {
  EXPECT_EQ(error.code(), code) << error.what();
  EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
      << "'" << text << "' is not in: " << error.what();
}

struct Seat {
  std::uint64_t process;
  char device;
};

std::vector<Place> places_of(const std::vector<Seat>& seats) {
  std::vector<Place> places(seats.size());
  for (std::size_t rank = 0; rank < seats.size(); ++rank) {
    places[rank].process = seats[rank].process;
    places[rank].device_uuid[0] = seats[rank].device;
  }
  return places;
}

TEST(CudaHostsOptions, OutOfRangeAreRefusedByName) {
  const std::string groups = "must be from 0 to 8";
  const std::string ctas = "must be from 0 to 64";
  for (const int value : {-1, 9}) {
    expect(error_of([&] { resolved({.network_groups = value}); }), ErrorCode::invalid_argument,
           "network_groups is " + std::to_string(value) + ", " + groups);
  }
  for (const int value : {-1, 65}) {
    expect(error_of([&] { resolved({.network_ctas = value}); }), ErrorCode::invalid_argument,
           "network_ctas is " + std::to_string(value) + ", " + ctas);
  }
}

TEST(CudaHostsOptions, HaveDefaults) {
  EXPECT_EQ(resolved({}).network_ctas, 8);
  EXPECT_EQ(resolved({}).network_groups, 0);  // the cost model's choice
  EXPECT_EQ(resolved({.network_groups = 8, .network_ctas = 64}).network_groups, 8);
  EXPECT_EQ(resolved({.network_groups = 8, .network_ctas = 64}).network_ctas, 64);
}

TEST(CudaHostsOptions, ThatDifferAreRefusedWithBothValues) {
  std::vector<Place> places = places_of({{1, 'a'}, {1, 'b'}, {1, 'c'}});
  require_equal_options(places);
  places[2].options.network_groups = 3;
  expect(error_of([&] { require_equal_options(places); }), ErrorCode::config_mismatch,
         "network_groups: rank 0 has 0, rank 2 has 3");
  places[1].options.network_ctas = 4;
  places[2].options.network_groups = 0;
  expect(error_of([&] { require_equal_options(places); }), ErrorCode::config_mismatch,
         "network_ctas: rank 0 has 0, rank 1 has 4");
}

TEST(Places, OfAHostAreADeviceEachOrOneForAll) {
  const Topology two_by_two = even_topology(2, 2);
  EXPECT_EQ(arrangements_of(places_of({{1, 'a'}, {1, 'a'}, {2, 'a'}, {3, 'b'}}), two_by_two),
            (std::vector{Arrangement::one_device, Arrangement::device_each}));
  expect(error_of([&] {
           arrangements_of(places_of({{1, 'a'}, {1, 'b'}, {2, 'c'}, {3, 'c'}}), two_by_two);
         }),
         ErrorCode::unsupported, "ranks 2 and 3 are on the same CUDA device");
}

TEST(Places, PeersOfAHostThatCannotBeReachedAreNamedWithTheirDevices) {
  std::vector<Place> places(12);
  for (int rank = 0; rank < 12; ++rank) places[rank].device = rank % 6;
  const Topology two_by_six = even_topology(2, 6);
  const auto reaches_below = [](int device) {
    return [device](const Place& peer) { return peer.device < device; };
  };
  require_reach(places, two_by_six, 11, reaches_below(5));  // a rank reaches itself
  const Error of_two = error_of([&] { require_reach(places, two_by_six, 7, reaches_below(4)); });
  expect(of_two, ErrorCode::unsupported,
         "rank 7 (device 1) cannot load and store in the memory of rank 10 (device 4), rank 11 "
         "(device 5): CUDA has no peer access");
  for (const char* advice : {"nvidia-smi topo -p2p rw", "overlap on and off", "different hosts"}) {
    expect(of_two, ErrorCode::unsupported, advice);
  }
  // What all are told is cut where it is long.
  const Error of_all = error_of([&] { require_reach(places, two_by_six, 0, reaches_below(0)); });
  expect(of_all, ErrorCode::unsupported, "rank 4 (device 4) and 1 more: ");
  EXPECT_LT(std::string(of_all.what()).size(), sizeof(LocalOutcome::message) - 20);
}

TEST(Places, HostsOfOneProcessAreThreadsAndOthersTakeADeviceOnce) {
  const Topology two = even_topology(2, 1);
  EXPECT_EQ(hosts_are(places_of({{1, 'a'}, {1, 'a'}}), two), HostsAre::threads);
  EXPECT_EQ(hosts_are(places_of({{1, 'a'}, {2, 'b'}}), two), HostsAre::processes);
  expect(error_of([&] {
           hosts_are(places_of({{1, 'a'}, {2, 'a'}}), two);
         }),
         ErrorCode::unsupported, "ranks 0 and 1 are on the same CUDA device");
}

TEST(Places, HostsThatNcclTellsApartMayShareADevice) {
  const Topology two = even_topology(2, 1);
  std::vector<Place> places = places_of({{1, 'a'}, {2, 'a'}});
  places[0].nccl_host = 7;  // the other one's is the machine's
  EXPECT_EQ(hosts_are(places, two), HostsAre::processes);
  places[1].nccl_host = 7;
  expect(error_of([&] { hosts_are(places, two); }), ErrorCode::unsupported, "NCCL_HOSTID");
  places[1].nccl_host = 8;
  EXPECT_EQ(hosts_are(places, two), HostsAre::processes);
}

TEST(Places, RanksBesideThisOneAreOfItsProcessAndDevice) {
  EXPECT_EQ(ranks_beside(places_of({{1, 'a'}, {1, 'a'}, {1, 'b'}, {2, 'a'}}), 1), 2);
}

}  // namespace
}  // namespace megamoe::cuda
