package policy

import (
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/internal/strictyaml"
)

// WatchConfig configures a Watcher. The zero value is ready for use.
type WatchConfig struct {
	// Check, when set, may reject policies that are valid in themselves, for example because this process lacks what
	// they need. Its error is handled like mistakes in the file. It may be called several times for one content.
	Check func(*Set) error
	// OnChange, when set, is called with the new policies after they have come into force, when the content of the file
	// has changed. It is not called for the first load by NewWatcher.
	OnChange func(*Set)
	// OnError, when set, is called when the file cannot be read (the error wraps the operating system's), has mistakes
	// (Errors) or is rejected by Check. It is called once while the file stays the same. The policies in force stay.
	OnError func(error)
}

// Watcher keeps the policies of a file up to date. One goroutine calls the functions of WatchConfig. They must not call
// Close, which waits for them.
type Watcher = reload.Watcher[*Set]

// NewWatcher loads a file. After Watcher.Watch it loads the file again whenever it changes, until Close. A mistake is
// an error of NewWatcher; later the file may have mistakes, be replaced, disappear and come back.
func NewWatcher(file string, cfg WatchConfig) (*Watcher, error) {
	return reload.Open([]string{file}, reload.Config[*Set]{
		Parse: func(contents [][]byte) (*Set, error) {
			set, err := Parse(file, contents[0])
			if err == nil && cfg.Check != nil {
				err = cfg.Check(set)
			}
			return set, err
		},
		OnChange: cfg.OnChange, OnError: cfg.OnError, MaxSize: strictyaml.MaxFile,
	})
}
