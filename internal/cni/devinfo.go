// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"io/fs"

	"github.com/smcr-io/kube-smcr/internal/devices/deviceinfo"
)

// readDeviceInfo returns what the device plugin wrote about a device: in the file that
// the runtime made for this attachment, or else in the device plugin's own file. name is
// the file that was read; without any file, name is "" and info empty.
func readDeviceInfo(attachmentFile, dpDir, deviceID string) (info deviceinfo.Info, name string, err error) {
	if attachmentFile != "" {
		info, err := deviceinfo.Read(attachmentFile)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return info, attachmentFile, err
		}
	}
	// The configuration does not say of which resource the device is: search all files.
	name, err = deviceinfo.Find(dpDir, deviceID)
	if name == "" || err != nil {
		return deviceinfo.Info{}, "", err
	}
	info, err = deviceinfo.Read(name)
	return info, name, err
}
