package policy

import (
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/internal/strictyaml"
)

// WatchConfig says how a file is watched and who is told. Its zero value is ready for use.
type WatchConfig struct {
	// Check may reject policies that are right by themselves, such as for what this process lacks: what it returns is
	// handled as mistakes in the file are. It may be called several times for one content. May be nil.
	Check func(*Set) error
	// OnChange is called with the new policies after they are in force, when the content of the file has changed. It is
	// not called for what NewWatcher loads. May be nil.
	OnChange func(*Set)
	// OnError is called when the file cannot be read (an error that wraps the operating system's), has mistakes in it
	// (Errors) or is rejected by Check, once for as long as it stays the same. The policies in force stay. May be nil.
	OnError func(error)
}

// Watcher keeps the policies of a file up to date. The calls of WatchConfig are made by one goroutine, one at a time, and
// must not call Close, which waits for them.
type Watcher = reload.Watcher[*Set]

// NewWatcher loads a file, which is followed from Watcher.Watch on until Close. The file must be without mistakes now; later it may have
// some, be replaced, disappear and come back.
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
