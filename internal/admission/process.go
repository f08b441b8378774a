package admission

import (
	"fmt"
	"log/slog"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
)

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
