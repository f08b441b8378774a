package reload

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// Timeout is a good time to wait for a small file: longer than any file system takes that works.
const Timeout = 5 * time.Second

// ErrTimeout is wrapped by the errors of reads that did not end in time.
var ErrTimeout = errors.New("the file system does not answer")

// ErrNotRegular is wrapped by the errors of reads of what is not a regular file.
var ErrNotRegular = errors.New("not a regular file")

// ErrDirectory is wrapped by those of them that were of a directory.
var ErrDirectory = fmt.Errorf("%w but a directory", ErrNotRegular)

// ReadPrefix returns the first limit bytes of a regular file, or all of a shorter one. Symbolic links are followed. Anything
// else, such as a pipe, a device or a directory, is rejected without waiting for whoever may be at its other end. It
// returns when the file system answers, which may be never.
func ReadPrefix(name string, limit int64) (content []byte, err error) {
	// O_NONBLOCK: a pipe is opened at once, where it would wait for a writer.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return nil, &fs.PathError{Op: "read", Path: name, Err: ErrDirectory}
	}
	if mode := info.Mode(); !mode.IsRegular() {
		return nil, &fs.PathError{Op: "read", Path: name, Err: fmt.Errorf("%w: its mode is %v", ErrNotRegular, mode)}
	}
	return io.ReadAll(io.LimitReader(f, limit))
}

// ReadFile returns the content of a regular file, as ReadPrefix reads it. A file of more than limit bytes is an error, as is one
// that cannot be read within Timeout: the read is left behind then. It is for programs that read a file once, when they
// start.
func ReadFile(name string, limit int64) ([]byte, error) {
	return within(name, Timeout, func() ([]byte, error) {
		content, err := ReadPrefix(name, limit+1)
		if err == nil && int64(len(content)) > limit {
			err = SizeError(name, limit)
		}
		return content, err
	})
}

// ReadableByOthers reports whether users of the host that are neither a file's owner nor in its group may read it. A file
// system that does not answer within Timeout is an error.
func ReadableByOthers(name string) (bool, error) {
	return within(name, Timeout, func() (bool, error) {
		info, err := os.Stat(name)
		return err == nil && info.Mode().Perm()&0o004 != 0, err
	})
}

// OpenAppend opens a file to be appended to, and makes it, for its owner alone, where there is none. A pipe that nobody reads is an error, as is a file system
// that does not answer within Timeout. Writes to what is returned may still wait for as long as it pleases whoever takes them.
func OpenAppend(name string) (*os.File, error) {
	return within(name, Timeout, func() (*os.File, error) {
		return os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NONBLOCK, 0o600)
	})
}

// within waits for a call for some time.
func within[T any](name string, timeout time.Duration, read func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1) // so that a read that is left behind can end
	go func() {
		value, err := read()
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-time.After(timeout):
		return *new(T), TimeoutError(name, timeout)
	}
}

// TimeoutError is the error for a file that has not been reached in time.
func TimeoutError(name string, after time.Duration) error {
	return &fs.PathError{Op: "reach", Path: name, Err: fmt.Errorf("%w within %v", ErrTimeout, after)}
}

// SizeError is the error for a file of more than limit bytes.
func SizeError(name string, limit int64) error {
	return &fs.PathError{Op: "read", Path: name, Err: fmt.Errorf("is too large: more than %d bytes", limit)}
}
