#include "compare/command.h"

int main(int argc, char** argv) { return longstraw::compare::compare_main(argc, argv); }
