package admission

import (
	"fmt"
	"log/slog"
	"math"
	"os"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/dustin/go-humanize"
)

// LimitPercent is the runtime's memory limit in percent of the usable memory. The rest is for what the runtime does not
// count: the program's own pages, the kernel's buffers and tables.
const LimitPercent = 90

// UsableMemory returns how many bytes the process may use: the smallest of the limits of its control group (v1 or v2)
// and the groups above it, the machine's memory, and, if GOMEMLIMIT is given, the number of which GOMEMLIMIT is
// LimitPercent.
func UsableMemory() (int64, error) {
	return usable(memlimit.FromCgroup, memlimit.FromSystem, debug.SetMemoryLimit(-1))
}

// OwnBudget returns the budget of a node that may use all memory of its process. If UsableMemory fails, it is the
// budget for 1 GiB.
func OwnBudget() Budget {
	usable, err := UsableMemory()
	if err != nil {
		usable = 1 << 30
	}
	return Divide(usable)
}

// usable is UsableMemory for these sources and the runtime's limit, which is math.MaxInt64 if none is set.
func usable(group, machine memlimit.Provider, limit int64) (int64, error) {
	most, err := machine()
	if n, groupErr := group(); groupErr == nil && (err != nil || n < most) {
		most, err = n, nil
	}
	if limit < math.MaxInt64 {
		if n := uint64(limit) / LimitPercent * 100; err != nil || n < most {
			most, err = n, nil
		}
	}
	if err != nil {
		return 0, fmt.Errorf("how much memory the process may use cannot be told: %w", err)
	}
	return int64(min(most, math.MaxInt64)), nil
}

// SetMemoryLimit sets the runtime's memory limit to LimitPercent of usable bytes, unless GOMEMLIMIT is given. It
// returns the limit in force.
func SetMemoryLimit(usable int64) int64 {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(usable / 100 * LimitPercent)
	}
	return debug.SetMemoryLimit(-1)
}

// ParseMemory parses an amount of memory such as 512MiB, or a share such as 70% of UsableMemory. It returns bytes, 0
// for auto and -1 for 0 (no bound).
func ParseMemory(s string) (int64, error) {
	if s == "auto" {
		return 0, nil
	}
	if share, ok := strings.CutSuffix(s, "%"); ok {
		n, err := strconv.ParseUint(share, 10, 8)
		if err != nil || n == 0 || n > 100 {
			return 0, fmt.Errorf("%q is not a share from 1%% to 100%%", s)
		}
		most, err := UsableMemory()
		if err != nil {
			return 0, fmt.Errorf("%w: give an amount such as 512MiB", err)
		}
		return most / 100 * int64(n), nil
	}
	n, err := humanize.ParseBytes(s)
	if err != nil || n > 1<<62 {
		return 0, fmt.Errorf("%q is not an amount of memory such as 512MiB, or a share such as 70%%", s)
	}
	if n == 0 {
		return -1, nil
	}
	if n < 16<<20 {
		return 0, fmt.Errorf("%q is below the least that makes sense, 16MiB", s)
	}
	return int64(n), nil
}

// LimitProcess sets the runtime's memory limit by UsableMemory, and logs it.
func LimitProcess(log *slog.Logger) {
	usable, err := UsableMemory()
	if err != nil {
		log.Warn("memory limit not set", "error", err)
		return
	}
	log.Info("memory limit set", "usable_bytes", usable, "gomemlimit_bytes", SetMemoryLimit(usable))
}
