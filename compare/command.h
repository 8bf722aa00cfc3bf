#pragma once
// The command `longstraw-compare A.h5 B.h5`, also reached as `longstraw compare`.

namespace longstraw::compare {

// Parses, runs, prints. Returns the exit status (core/base/errors.h); throws nothing.
int compare_main(int argc, char** argv);

}  // namespace longstraw::compare
