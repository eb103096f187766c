// Runs tests of the layer on two stand-in hosts: the cases, the bits, the oracle.
#include <gtest/gtest.h>

#include "verify/run.h"

int main(int argc, char** argv) {
  megamoe::verify::set_default_num_hosts(2);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
