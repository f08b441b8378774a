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

// LimitPercent is the part of the usable memory that Go's runtime is held to. The rest is for what it does not see: the
// program's own pages, the kernel's buffers and tables.
const LimitPercent = 90

// UsableMemory returns how many bytes the process may use: the smallest of the limit of its control group (v1 or v2; those above it
// included), the machine's memory, and, when GOMEMLIMIT is given, the number that that is LimitPercent of.
func UsableMemory() (int64, error) {
	return usable(memlimit.FromCgroup, memlimit.FromSystem, debug.SetMemoryLimit(-1))
}

// OwnBudget is the budget of a node that has the process to itself; of 1 GiB where what the process may use cannot be found out.
func OwnBudget() Budget {
	usable, err := UsableMemory()
	if err != nil {
		usable = 1 << 30
	}
	return Divide(usable)
}

// usable is UsableMemory of these sources and of the runtime's limit, which is math.MaxInt64 where there is none.
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

// SetMemoryLimit sets the runtime's limit of memory to LimitPercent of usable bytes, unless GOMEMLIMIT is given, and returns the limit
// in force.
func SetMemoryLimit(usable int64) int64 {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(usable / 100 * LimitPercent)
	}
	return debug.SetMemoryLimit(-1)
}

// ParseMemory reads an amount of memory, or a share of what the process may use; auto is 0, and no bound -1.
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

// LimitProcess has the garbage collector keep the process within the memory that it may use.
func LimitProcess(log *slog.Logger) {
	usable, err := UsableMemory()
	if err != nil {
		log.Warn("memory limit not set", "error", err)
		return
	}
	log.Info("memory limit set", "usable_bytes", usable, "gomemlimit_bytes", SetMemoryLimit(usable))
}
