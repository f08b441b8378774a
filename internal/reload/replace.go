package reload

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
)

// Replacer replaces a file, for its owner alone, as a whole. Its methods are safe for concurrent use.
type Replacer struct {
	Name string

	mu sync.Mutex // held by the one call that writes, also by one that was left behind
}

// Replace gives the file a new content, and makes the file where there is none. When it returns nil, the content is on disk. With an error
// the file has this content or the one before, whole in any case, also when the machine loses power meanwhile. A file system that does
// not answer within Timeout is an error that leaves the call behind: until it ends, later calls fail at once.
func (r *Replacer) Replace(content []byte) error {
	if !r.mu.TryLock() {
		return &fs.PathError{Op: "write", Path: r.Name, Err: ErrTimeout}
	}
	_, err := within(r.Name, Timeout, func() (struct{}, error) {
		defer r.mu.Unlock()
		return struct{}{}, replace(r.Name, content)
	})
	return err
}

func replace(name string, content []byte) (err error) {
	directory := filepath.Dir(name)
	f, err := os.CreateTemp(directory, "."+filepath.Base(name)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name()) // the error is about what went wrong before
		}
	}()
	_, err = f.Write(content)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), name); err != nil {
		return err
	}
	// The new name is on disk once its directory is.
	d, err := os.Open(directory)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
