// Runs tests of the layer on two stand-in hosts: the cases, the bits, the oracle.
#include <gtest/gtest.h>

#include "over_hosts.h"
#include "verify/run.h"

int main(int argc, char** argv) {
  megamoe::verify::set_default_num_hosts(2);
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new megamoe::verify::OverHosts);
  return RUN_ALL_TESTS();
}
