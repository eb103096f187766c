// Ranks of a host that should load and store in each other's memory and cannot: which they are, and
// what is said.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/cuda/places.h"
#include "megamoe/error.h"
#include "megamoe/topology.h"

namespace megamoe::cuda {

/// "rank 1 (device 1), rank 3 (device 0)": devices as the ranks' own processes number them. Many
/// ranks are cut short: errors that are told to all have room for some.
std::string seats_text(const std::vector<int>& ranks, const std::vector<int>& devices_R);

/// What a user can do about it.
std::string advice_on_reach();

/// unsupported: `rank` reaches none of `peers`.
Error out_of_reach(int rank, const std::vector<int>& peers, const std::vector<int>& devices_R,
                   const std::string& reason);

/// Each rank's device, as its process numbers it.
std::vector<int> devices_of(const std::vector<Place>& places);

/// Throws out_of_reach() with the ranks of this rank's host of which `may_reach` says no.
void require_reach(const std::vector<Place>& places, const Topology& topology, int rank,
                   const std::function<bool(const Place&)>& may_reach);

}  // namespace megamoe::cuda
