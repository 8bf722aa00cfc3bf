#pragma once
// Which program this is, for records and --version.

namespace longstraw::app {

extern const char* const kVersion;    // of the project
extern const char* const kGitCommit;  // that was checked out when the build was configured; "unknown" outside a checkout

}  // namespace longstraw::app
