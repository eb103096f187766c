// A library that says which NCCL it is, and can do nothing else.
extern "C" int ncclGetVersion(int* version) {
  *version = MEGAMOE_STAND_IN_VERSION;
  return 0;
}
